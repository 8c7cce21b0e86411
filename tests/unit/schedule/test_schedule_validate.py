"""The validator accepts every schedule in every legal shape, and refuses broken programs with the place drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from schedule_shapes import build_shape, random_shapes

from megalite.errors import ScheduleError
from megalite.schedule import (
    Action,
    BatchRange,
    PeakActivations,
    Program,
    build_program,
    insert_unshard,
    lower,
    simulate,
    validate,
)
from megalite.schedule.message_order import Rendezvous, fifo_faults
from megalite.schedule.passes import insert_reduce

Edit = Callable[[list[Action]], list[Action]]


def test_random_programs_are_valid_and_keep_to_their_declared_figures() -> None:
    for name, shape in random_shapes(60, seed=6, largest_rank=5):
        program = lower(build_shape(name, shape))
        report = validate(program)
        run = simulate(program, batches=3 if program.asynchronous else 1)
        for rank in range(program.num_ranks):
            bound = sum(program.peak_activations[rank]) * program.activation_unit
            assert run.peak_activations_per_rank[rank] <= bound
            assert run.weight_versions_per_rank[rank] <= program.weight_versions[rank]
        # With few micro-batches some ranks never reach their bound, nor where it holds for all that may arrive.
        if shape.m >= 2 * shape.p + 1 and not program.max_in_flight:
            peaks = [sum(peak) * program.activation_unit for peak in program.peak_activations]
            assert list(run.peak_activations_per_rank) == peaks, (name, shape)
        assert report.in_order == (not name.startswith("chimera")), (name, shape)


def test_unsharded_weights_are_there_when_used() -> None:
    for name, shape in random_shapes(36, seed=7):
        program = build_shape(name, shape)
        if program.asynchronous:
            with pytest.raises(ScheduleError, match="--zero-stage=3: .* several weight versions"):
                insert_unshard(lower(program))
        else:
            validate(insert_unshard(lower(program)))


def test_breadth_first_gathers_each_chunk_at_most_once_per_direction() -> None:
    program = insert_unshard(lower(build_program("breadth-first", 2, 4, 3)))
    actions = program.actions_for_batch(0, program.batch(0))
    gathers = [str(action) for action in actions if action.kind in ("UNSHARD", "RESHARD")]
    # Chunks 0, 2, 4 forwards, then 4, 2, 0 backwards. One chunk is gathered ahead, so chunk 2, next to the turn, stays.
    assert " ".join(gathers) == "0UNSHARD0 2UNSHARD0 0RESHARD0 4UNSHARD0 4RESHARD0 0UNSHARD0 2RESHARD0 0RESHARD0"


def broken(program: Program, rank: int, edit: Edit) -> Program:
    """`program` with one rank's list of batch 1 edited."""

    def order(r: int, batch: BatchRange) -> list[Action]:
        actions = program.order(r, batch)
        return edit(list(actions)) if r == rank and batch.iteration == 1 else actions

    return program.with_order(order)


def at(actions: list[Action], kind: str, nth: int = 0) -> int:
    return [i for i, action in enumerate(actions) if action.kind == kind][nth]


def drop(kind: str, nth: int = 0) -> Edit:
    return lambda actions: [a for i, a in enumerate(actions) if i != at(actions, kind, nth)]


def twice(kind: str) -> Edit:
    return lambda actions: actions[: at(actions, kind) + 1] + actions[at(actions, kind) :]


def to_front(kind: str, nth: int = 0) -> Edit:
    return lambda actions: [actions[at(actions, kind, nth)]] + drop(kind, nth)(actions)


def to_end(kind: str, nth: int = 0) -> Edit:
    return lambda actions: drop(kind, nth)(actions) + [actions[at(actions, kind, nth)]]


def change(kind: str, nth: int = 0, **fields: int) -> Edit:
    def edit(actions: list[Action]) -> list[Action]:
        place = at(actions, kind, nth)
        actions[place] = actions[place]._replace(**fields)
        return actions

    return edit


def swap(kind: str, first: int, second: int) -> Edit:
    def edit(actions: list[Action]) -> list[Action]:
        i, j = at(actions, kind, first), at(actions, kind, second)
        actions[i], actions[j] = actions[j], actions[i]
        return actions

    return edit


def again(actions: list[Action]) -> list[Action]:
    """An R behind the first F."""
    place = at(actions, "F")
    return [*actions[: place + 1], actions[place]._replace(kind="R"), *actions[place + 1 :]]


@pytest.mark.parametrize(
    ("name", "rank", "edit", "rule"),
    [
        ("1f1b", 1, drop("F", 1), "V1 .* before its F"),
        ("1f1b", 1, drop("B", 3), "V1 .* has no B or I on stage 1"),
        ("zb-h1", 1, drop("W"), "V1 .* has no B or W on stage 1"),
        ("1f1b", 1, twice("F"), "V1 .* is done twice"),
        ("1f1b", 1, to_front("B"), "V1 .* before its F"),
        ("zb-h1", 1, to_front("W"), "V1 .* before its I"),
        ("1f1b", 1, drop("STEP"), "V1 one update .* has 1 of 2 STEPs"),
        ("1f1b", 1, twice("STEP"), "V1 one update .* update 2 of this stage is next"),
        ("1f1b", 1, to_front("STEP"), "V1 one update .* before REDUCE"),
        ("1f1b", 1, to_end("B", 3), "V1 one update .* after STEP 1"),
        ("2bw", 0, to_front("NORM"), "V1 one update .*0NORM1 is not between REDUCE 1 and its STEP"),
        ("2bw", 0, to_end("NORM"), "V1 one update .*0NORM1 is not between REDUCE 1 and its STEP"),
        ("1f1b", 1, to_front("REDUCE"), "V1 one update .* after REDUCE 1"),
        ("1f1b", 1, change("F", stage=2), "V1 .* rank 1 does not hold"),
        ("1f1b", 1, change("F", microbatch=99), "V1 .* there is no micro-batch 99"),
        ("shifted-critical-path", 1, drop("R", 1), "V1 .* before its R"),
        ("shifted-critical-path", 1, to_end("R", 3), "V1 .* 1B7v1 before its R"),
        ("shifted-critical-path", 1, to_front("R"), "V1 .* 1R4v1 before its F"),
        ("shifted-critical-path", 1, twice("R"), "V1 .* 1R4v1 is done twice"),
        ("shifted-critical-path", 2, again, "V1 .* 2R4v1: its stage keeps what its forward made"),
        ("shifted-critical-path", 1, swap("R", 1, 2), "V1 .* before its R"),
        ("1f1b", 1, again, "V1 .* 1R4v1: its stage keeps what its forward made"),
        ("1f1b", 1, swap("RECV_F", 0, 1), "V3 receives in the order"),
        ("1f1b", 0, swap("SEND_F", 0, 1), "V3 receives in the order"),
        ("1f1b", 1, drop("RECV_B"), "V3 receives in the order"),
        ("1f1b", 0, drop("SEND_F", 3), "V3 receives in the order"),
        ("1f1b", 1, to_end("RECV_F", 3), "V3 no deadlock"),
        ("1f1b", 1, change("B", version=0), "V4 .* version 0 is overwritten"),
        ("1f1b", 1, change("F", version=2), "V4 .* version 2 is not born"),
        ("2bw", 1, change("F", 0, version=0), "V4 .* declared staleness|V4 .* other stages"),
        ("2bw", 0, change("B", 1, version=1), "V4 .* its forward used version 0"),
    ],
)
def test_broken_programs_are_refused_with_the_place(name: str, rank: int, edit: Edit, rule: str) -> None:
    program = lower(build_program(name, 3, 4))
    batches = 3 if program.asynchronous else 2  # the last window of an endless stream is short
    validate(program, batches)
    with pytest.raises(ScheduleError, match=rule) as error:
        validate(broken(program, rank, edit), batches)
    drawn = [line for line in str(error.value).splitlines() if line.startswith("  rank ")]
    assert drawn and all("<-- HERE" in line for line in drawn), "a rank is drawn that breaks no rule"


@pytest.mark.parametrize("ranks", [2, 12])
def test_a_circle_of_waits_is_drawn_on_the_ranks_in_it(ranks: int) -> None:
    """Of many on some: one error is no book."""
    program = build_program("1f1b", ranks, 2)

    def order(rank: int, batch: BatchRange) -> list[Action]:
        f0, f1, b0, b1 = (Action(kind, rank, batch.start + k, batch.iteration) for kind in "FB" for k in (0, 1))
        wrong = [f0, b0, f1, b1] if rank == 0 else [f0, f1, b0, b1]  # rank 0 wants B0 before it has sent F1
        return [*wrong, Action("STEP", rank, batch.iteration)]

    with pytest.raises(ScheduleError, match="V2 no circle of waits: rank 0 waits for the input of 0B0") as error:
        validate(program.with_order(order))
    assert str(error.value).count("<-- HERE") == min(ranks, 8)
    assert str(error.value).endswith("and 4 more ranks") == (ranks == 12)
    with pytest.raises(ScheduleError, match="the ranks wait for each other: rank 0 at 0B0v0, rank 1 at 1F1v0"):
        simulate(program.with_order(order))


def with_r_on_the_last_stage(program: Program) -> Program:
    def order(rank: int, batch: BatchRange) -> list[Action]:
        actions = program.order(rank, batch)
        return again(list(actions)) if rank == program.num_ranks - 1 else actions

    return program.with_order(order)


def test_declared_figures_must_hold() -> None:
    program = lower(build_program("1f1b", 3, 4))
    with pytest.raises(ScheduleError, match=r"V6 .* rank 0 holds 3 \+ 0 .* declared 2 \+ 0"):
        validate(replace(program, peak_activations=(PeakActivations(2), PeakActivations(2), PeakActivations(1))))
    shifted = lower(build_program("shifted-critical-path", 3, 4))
    with pytest.raises(ScheduleError, match=r"V6 .* rank 0 holds 1 \+ 0 .* declared 0 \+ 0"):
        validate(replace(shifted, peak_activations=(PeakActivations(0), PeakActivations(1), PeakActivations(1))))
    with pytest.raises(ScheduleError, match="V1 .* 2R0v0: the last stage computes its loss once"):
        last = with_r_on_the_last_stage(shifted)
        validate(replace(last, recomputed=frozenset({0, 1, 2})))
    split = lower(build_program("zb-h1", 3, 4))
    with pytest.raises(ScheduleError, match="V6"):
        validate(replace(split, peak_activations=(PeakActivations(3), PeakActivations(2), PeakActivations(1, 2))))
    two = lower(build_program("2bw", 3, 4))
    with pytest.raises(ScheduleError, match="V4 .* is overwritten"):
        validate(replace(two, weight_versions=(1, 1, 1)))
    with pytest.raises(ScheduleError, match="V5 .* sums 2 updates at once, declared 1"):
        validate(replace(two, gradient_buffers=1))
    with pytest.raises(ScheduleError, match="V4 .* declared staleness asks for version"):
        validate(replace(two, staleness=(0, 0, 0)))


def test_2bw_below_its_bound_needs_unborn_weights() -> None:
    """m = p-2, forced past the table's refusal: the validator finds the same bound as the paper's arithmetic."""
    from megalite.schedule.definition import ScheduleShape
    from megalite.schedule.schedules.pipedream_2bw import SCHEDULE

    for p in range(3, 8):
        validate(SCHEDULE.build(ScheduleShape(p, p - 1)))
        with pytest.raises(ScheduleError, match="refused"):
            validate(SCHEDULE.build(ScheduleShape(p, p - 2)))


def test_reductions_follow_the_last_gradient() -> None:
    for name, shape in random_shapes(36, seed=8):
        program = insert_reduce(build_shape(name, shape))
        for actions in program.unroll(3):
            open_updates: dict[tuple[int, int], int] = {}
            for before, action in zip(actions, actions[1:], strict=False):
                key = (action.stage, action.replica)
                if action.kind == "REDUCE":
                    assert before.kind == "REDUCE" or any(part.kind in "BW" for part in before.computations())
                    open_updates[key] = action.microbatch
                if action.kind == "STEP":
                    assert open_updates[key] >= action.microbatch


def test_one_communicator_for_both_directions_would_deadlock() -> None:
    """Why the transport keeps the directions apart: what the three models of the validator tell about 1F1B."""
    program = lower(build_program("1f1b", 3, 4))
    lists = program.unroll(2)
    assert not Rendezvous(lists, program.placement, "pair").faults()
    assert not Rendezvous(lists, program.placement, "direction").faults()
    assert Rendezvous(lists, program.placement, "rank").faults()


def test_receives_placed_by_their_user_would_cross() -> None:
    """The trap that the sender's order avoids: on a V, with each RECV directly before its use, wires mix up
    messages.
    """
    program = lower(build_program("zb-v", 4, 8))
    lists = [list(actions) for actions in program.unroll(1)]
    assert not list(fifo_faults(lists))
    for actions in lists:
        for recv in [action for action in actions if action.kind in ("RECV_F", "RECV_B")]:
            actions.remove(recv)
            users = "F" if recv.kind == "RECV_F" else "BI"
            taken = [(a.kind in users, a.stage, a.microbatch) for a in actions]
            actions.insert(taken.index((True, recv.stage, recv.microbatch)), recv)
    assert len(list(fifo_faults(lists))) == 3


def test_no_action_can_be_missing() -> None:
    rng = random.Random(9)
    for name, shape in random_shapes(48, seed=10, largest_rank=4):
        program = lower(build_shape(name, shape))
        rank = rng.randrange(program.num_ranks)
        actions = program.actions_for_batch(rank, program.batch(1, first=False))
        victim = rng.choice([i for i, action in enumerate(actions) if action.kind != "NORM"])  # STEP does without it
        with pytest.raises(ScheduleError, match="<-- HERE"):
            validate(broken(program, rank, lambda actions, v=victim: actions[:v] + actions[v + 1 :]), 3)
