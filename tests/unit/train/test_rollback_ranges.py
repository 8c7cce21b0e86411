"""Ranges of samples that a run passes over, and what a rollback makes of them, without a run."""

from __future__ import annotations

import random
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.checkpoint import Meta
from megalite.config import BatchSizeSchedule, Spikes
from megalite.errors import CheckpointError, RuntimeFailure
from megalite.train.rollback import PassedOver, Rollback, SampleRange


@pytest.mark.parametrize("seed", range(20))
def test_ranges_hold_what_was_put_into_them(seed: int) -> None:
    """Against a set of iterations; all batches have four samples."""
    draw, flags = random.Random(seed), {3, 50}
    passed, held = PassedOver(flags), set[int]()
    for _ in range(8):
        after, count = draw.randrange(40), draw.randrange(1, 6)
        passed.add(SampleRange(4 * after, 4 * (after + count), after, after + count, draw.randrange(3)))
        held |= set(range(after + 1, after + count + 1))
    again = PassedOver(flags)
    again.take_up(Meta({"ranges": [asdict(each) for each in passed.ranges]}, "here"), "ranges")
    for each in (passed, again):
        assert {number for number in range(1, 60) if number in each} == held | flags
        assert {number for number in range(1, 60) if each.holds(number, 4 * (number - 1))} == held | flags
        assert all(one.last <= other.first for one, other in zip(each.ranges, each.ranges[1:], strict=False))


@pytest.mark.parametrize("row", [3, {"first": 1}, {"first": "0", "last": 1, "after": 0, "until": 1, "rollbacks": 0}])
def test_a_damaged_checkpoint_is_named(row: Any) -> None:
    with pytest.raises(CheckpointError, match="here: ranges"):
        PassedOver().take_up(Meta({"ranges": [row]}, "here"), "ranges")


def rollback(passed: PassedOver, sizes: BatchSizeSchedule, steps: list[int]) -> Rollback:
    """Over checkpoints of these iterations."""

    def find(step: int) -> int | None:
        return max((saved for saved in steps if saved <= step), default=None)

    settings = Spikes(on_spike="rollback", rollback_iters=10, rollback_skip_iters=15, rollback_limit=2)
    load = lambda step: (step, sizes.samples_after(step))  # noqa: E731
    return Rollback(SimpleNamespace(settings=settings, speaks=False), sizes, passed, find, load)


def test_samples_are_counted_with_a_growing_batch() -> None:
    passed, sizes = PassedOver(), BatchSizeSchedule.ramp(4, 4, 200, 16)
    record = rollback(passed, sizes, [20, 40]).__call__(55)
    assert record is not None and record["checkpoint_iteration"] == 40
    (made,) = passed.ranges
    assert (made.first, made.last) == (sizes.samples_after(45), sizes.samples_after(60))
    assert (made.after, made.until, made.rollbacks) == (45, 60, 1)


def test_a_spike_behind_a_range_enlarges_it_and_one_far_away_does_not() -> None:
    passed, sizes = PassedOver(), BatchSizeSchedule.constant(4)
    back = rollback(passed, sizes, [20, 40])
    assert back(55) and back(62)
    assert [(each.after, each.until, each.rollbacks) for each in passed.ranges] == [(45, 67, 2)]
    with pytest.raises(RuntimeFailure, match="iteration 70: another spike, after 2 rollbacks"):
        back(70)
    assert back(80)
    assert [(each.after, each.until) for each in passed.ranges] == [(45, 67), (70, 85)]


def test_without_an_old_checkpoint_nothing_is_passed_over() -> None:
    passed = PassedOver()
    assert rollback(passed, BatchSizeSchedule.constant(4), [20])(25) is None and not passed.ranges
