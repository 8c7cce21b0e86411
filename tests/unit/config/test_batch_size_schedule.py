"""Both forms of batch ramp-up, against a walk that simulates the training iteration by iteration."""

from __future__ import annotations

import random

import pytest

from megalite.config.batch_size import BatchSizeSchedule


def walk(schedule: BatchSizeSchedule, iterations: int, consumed: int = 0) -> int:
    for _ in range(iterations):
        consumed += schedule.at(consumed)
    return consumed


def test_ramp_is_linear_in_samples() -> None:
    schedule = BatchSizeSchedule.ramp(4, 2, 60, 10)
    assert schedule.steps == ((0, 4), (20, 6), (40, 8), (60, 10))
    assert [schedule.at(n) for n in (0, 19, 20, 39, 40, 59, 60, 10**9)] == [4, 4, 6, 6, 8, 8, 10, 10]


def test_ramp_of_the_gpt3_recipe() -> None:
    # 16 to 1536 in steps of 16 over 5,859,375 samples: 96 sizes, the full one from the last sample of the ramp on.
    schedule = BatchSizeSchedule.ramp(16, 16, 5_859_375, 1536)
    assert len(schedule.sizes) == 96
    assert schedule.at(5_859_374) == 1520 and schedule.at(5_859_375) == 1536


def test_ramp_from_the_full_size_is_constant() -> None:
    assert BatchSizeSchedule.ramp(8, 4, 100, 8) == BatchSizeSchedule.constant(8)
    with pytest.raises(ValueError):
        BatchSizeSchedule.ramp(4, 5, 100, 8)


def test_step_schedule_counts_tokens() -> None:
    schedule = BatchSizeSchedule.parse("0:768 250B:1536 0.5T:3072", seq_length=2048)
    assert schedule.steps == ((0, 768), (122_070_313, 1536), (244_140_625, 3072))
    assert schedule.final == 3072


@pytest.mark.parametrize("text", ["", "768", "1K:8", "0:8 0:9", "0:8 5K:0", "0:8 9K:4 8K:5", "0:8;9:9", "-1:8"])
def test_malformed_step_schedules_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        BatchSizeSchedule.parse(text, 8)


@pytest.mark.parametrize("seed", range(20))
def test_conversions_equal_the_walk(seed: int) -> None:
    draw = random.Random(seed)
    firsts = sorted({0, *(draw.randrange(1, 400) for _ in range(draw.randrange(4)))})
    schedule = BatchSizeSchedule(tuple((first, draw.randrange(1, 30)) for first in firsts))
    start = walk(schedule, draw.randrange(5))
    for iterations in range(40):
        assert schedule.samples_after(iterations, start) == walk(schedule, iterations, start)
    for samples in range(start, start + 500, 7):
        iterations = schedule.iterations_for(samples, start)
        assert walk(schedule, iterations, start) >= samples
        assert iterations == 0 or walk(schedule, iterations - 1, start) < samples
