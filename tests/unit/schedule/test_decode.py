"""Programs of forwards: valid at any shape, as busy as p ranks can be, and refused when they are not."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from megalite.errors import ScheduleError
from megalite.schedule import Action, BatchRange, Program, simulate, validate
from megalite.schedule.decode import forward_program
from megalite.schedule.passes import insert_communication
from megalite.schedule.stage_placement import loop, vee


@pytest.mark.parametrize("placement", [loop(1), loop(2), loop(4), loop(2, 2), vee(3)], ids=str)
@pytest.mark.parametrize("groups", [1, 3, 5])
def test_valid_at_any_shape(placement: object, groups: int) -> None:
    for rounds in (1, 2, 5):
        for chunks in (None, (3,) * groups, tuple(1 + g % 3 for g in range(groups))):
            validate(forward_program(placement, groups, rounds=rounds, chunks=chunks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 4, 7])
def test_ranks_work_for_as_much_of_the_time_as_there_are_groups(ranks: int, groups: int) -> None:
    """min(1, g / p) in the limit of many rounds, exactly: what a further round costs and how much of it is work."""
    few, many = (simulate(forward_program(loop(ranks), groups, rounds=rounds)) for rounds in (3, 8))
    time, work = many.makespan - few.makespan, sum(many.busy_per_rank) - sum(few.busy_per_rank)
    assert work / (ranks * time) == min(Fraction(1), Fraction(groups, ranks))


def test_chunks_of_a_prompt_fill_the_pipeline() -> None:
    one = simulate(forward_program(loop(4), 1, rounds=1, chunks=(8,)))
    assert one.makespan == 8 + 3, "as eight micro-batches"


def computations(program: Program, rank: int, batch: BatchRange) -> list[Action]:
    return [action for action in program.order(rank, batch) if action.is_compute]


def changed(program: Program, order: object) -> Program:
    return insert_communication(replace(program, order=order, has_communication=False), ahead=0)


def test_a_scheduler_that_keeps_one_stage_busy_is_refused() -> None:
    """One group through all of its rounds before the next begins."""
    program = forward_program(loop(2), 2, rounds=3)

    def one_after_the_other(rank: int, batch: BatchRange) -> list[Action]:
        forwards = computations(program, rank, batch)
        return sorted(forwards, key=lambda action: (action.microbatch, action.stage))

    with pytest.raises(ScheduleError, match="V8 no rank waits.*3 rounds of 2 groups take 11 forwards, 7 are enough"):
        validate(changed(program, one_after_the_other))


def test_a_rank_with_everybodys_work_is_refused() -> None:
    program = forward_program(loop(2), 2, rounds=2)

    def all_on_rank_0(rank: int, batch: BatchRange) -> list[Action]:
        forwards = [action for r in (0, 1) for action in computations(program, r, batch)]
        return sorted(forwards, key=lambda action: action.stage) if rank == 0 else []

    with pytest.raises(ScheduleError, match="rank 0 does not hold the stage of 1F0"):
        validate(changed(program, all_on_rank_0))


def test_a_token_that_cannot_come_back_is_refused() -> None:
    """The first rank asks for the token of group 0 before it gives the last rank anything to choose it from."""
    program = forward_program(loop(2), 1, rounds=2)

    def too_early(rank: int, batch: BatchRange) -> list[Action]:
        forwards = computations(program, rank, batch)
        return forwards[::-1] if rank == 0 else forwards

    with pytest.raises(ScheduleError, match="V2 no circle of waits.*waits for the input of 2F0"):
        validate(changed(program, too_early))
    four = forward_program(loop(4), 1, rounds=2)
    ahead = replace(four, order=lambda rank, batch: computations(four, rank, batch), has_communication=False)
    with pytest.raises(ScheduleError, match="V3 no deadlock when sends wait"):
        validate(insert_communication(ahead, ahead=1))


def test_a_round_that_is_left_out_is_refused() -> None:
    program = forward_program(loop(2), 2, rounds=2)

    def short(rank: int, batch: BatchRange) -> list[Action]:
        return [a for a in computations(program, rank, batch) if (a.stage, a.microbatch) != (3, 1)]

    with pytest.raises(ScheduleError, match="micro-batch 1 has no F on stage 3"):
        validate(changed(program, short))
