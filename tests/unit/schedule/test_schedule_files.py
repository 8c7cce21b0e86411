"""Schedules in text files: read, proved, written; mistakes named by line."""

from __future__ import annotations

from pathlib import Path

import pytest
from schedule_shapes import build_shape, random_shapes
from toy_machine import Machine, sequential

from megalite.errors import ScheduleError
from megalite.schedule import SCHEDULES, build_program, dump_program, load_program, lower, parse_program, validate

OWN = """\
# two ranks, three micro-batches
name: my-own
ranks: 2
stages: 0 1
microbatches: 3
rank 0: 0F0 0F1 0B0 0F2 0B1 0B2   # 1F1B by hand
rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
"""


def test_own_schedule_is_proved_and_runs(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text(OWN)
    program = load_program(path)
    assert program.name == "my-own" and program.num_microbatches == 3
    assert program.unroll(2) == build_program("1f1b", 2, 3).unroll(2)
    assert [tuple(peak) for peak in program.peak_activations] == [(2, 0), (1, 0)]
    lowered = lower(program)
    assert Machine(lowered).run(lowered.batches(3)) == sequential(2, lowered.batches(3), delay=0)


def test_a_file_may_recompute(tmp_path: Path) -> None:
    text = OWN.replace("0B0 0F2 0B1 0B2", "0R0 0B0 0F2 0R1 0B1 0R2 0B2")
    program = parse_program(text)
    validate(program)
    assert program.recomputed == {0} and [peak.full for peak in program.peak_activations] == [1, 1]
    lowered = lower(program)
    assert Machine(lowered).run(lowered.batches(3)) == sequential(2, lowered.batches(3), delay=0)
    with pytest.raises(ScheduleError, match="V1 .* 0B1v0 before its R"):
        validate(parse_program(text.replace("0R1 ", "")))


def test_every_flush_schedule_survives_the_round_trip() -> None:
    for name, shape in random_shapes(36, seed=12, largest_rank=4):
        program = build_shape(name, shape)
        if program.asynchronous:
            with pytest.raises(ScheduleError, match="never drains"):
                dump_program(program)
            continue
        text = dump_program(program)
        assert "STEP" not in text
        if not SCHEDULES[name].splits_backward:  # lowering joins I and W that stand side by side
            assert dump_program(lower(program)) == text
        again = parse_program(text)
        validate(again)
        assert dump_program(again) == text
        assert again.unroll(2) == program.unroll(2)


def test_messages_and_steps_in_a_file_are_placed_by_the_passes() -> None:
    noisy = OWN.replace("0F0 0F1", "0F0 0SEND_F0>1 0F1 0STEP0 0REDUCE0").replace("1F0 1B0", "1RECV_F0<0 1F0 1B0")
    assert parse_program(noisy).unroll(2) == parse_program(OWN).unroll(2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ranks: 2", "ranks: two", "line 3: .*whole numbers|'two': whole numbers"),
        ("ranks: 2\n", "", "`ranks: N` with N >= 1 is missing"),
        ("microbatches: 3\n", "", "`microbatches: N` with N >= 1 is missing"),
        ("stages: 0 1\n", "", "`stages:` with the rank of each stage is missing"),
        ("stages: 0 1", "stages: 0 2", r"ranks with stages: \[0, 2\]"),
        ("stages: 0 1", "stages: 0 1\nstages: 1", "must have the same length"),
        ("0B1 0B2", "0B1 0X", "line 6: cannot read the action '0X'"),
        ("0B1 0B2", "0B1 0X2", "rank 0: 0X2: no computation; write F, B, I, W or R"),
        ("0B1 0B2", "0B1 2B2", "rank 0: 2B2: no such stage .1 x 2 in `stages:`"),
        ("0B1 0B2", "0B1 0B3", r"^rank 0: 0B3: there are micro-batches 0 to 2 \(microbatches: 3\)$"),
        ("0B1 0B2", "0B1 0.1B2", "rank 0: 0.1B2: no such stage"),
        ("0B1 0B2", "[0B1+1B2]", "rank 0: 1B2: that stage is on rank 1; move it"),
        ("rank 1:", "rank 0:", "line 7: rank 0 has two lists"),
        ("rank 1:", "rank1:", "line 7: unknown key 'rank1'"),
        ("name: my-own", "my-own", "line 2: 'my-own' has no colon"),
    ],
)
def test_mistakes_are_named(old: str, new: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse_program(OWN.replace(old, new))


def test_a_wrong_order_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text(OWN.replace("1F0 1B0 1F1 1B1 1F2 1B2", "1F2 1B2 1F0 1B0 1F1 1B1"))
    # Rank 0 wants B0 before it sends F2, rank 1 wants F2 first.
    with pytest.raises(ScheduleError, match="own.txt: schedule my-own is refused: V2 no circle") as error:
        load_program(path)
    assert str(error.value).count("<-- HERE") == 2
    path.write_text(OWN.replace("1F0 1B0", "1F0"))
    with pytest.raises(ScheduleError, match="V1 .*: micro-batch 0 has no B or I on stage 1") as error:
        load_program(path)
    assert "1B2v0 <-- HERE" in str(error.value), "the end of the first of both batches"
    (_, drawn) = str(error.value).split("\n")
    assert len(drawn) < 120
    assert not validate(parse_program(OWN.replace("1F0 1B0 1F1 1B1", "1F1 1F0 1B1 1B0"))).in_order
    with pytest.raises(ScheduleError, match="--pipeline-schedule-file=.*missing.txt: cannot be read"):
        load_program(tmp_path / "missing.txt")


def test_a_file_is_for_one_number_of_microbatches() -> None:
    program = parse_program(OWN)
    with pytest.raises(ScheduleError, match="written for 3 micro-batches per batch, not 4"):
        program.unroll([3, 4])
