"""Activations that wait on the host: as few transfers as brute force finds, the capacity kept, mistakes refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from schedule_shapes import build_shape, random_shapes

from megalite.errors import ScheduleError
from megalite.schedule import (
    Action,
    ActivationRoom,
    BatchRange,
    Costs,
    Program,
    build_program,
    insert_transfers,
    lower,
    merge_backward,
    residency,
    simulate,
    validate,
)
from megalite.schedule.transfers import plan

Interval = tuple[int, int]
"""Computations that make and use the activations of a micro-batch."""


def random_list(rng: random.Random, count: int) -> list[Action]:
    """F and B of `count` micro-batches of one stage in any legal order."""
    waiting, begun, actions = list(range(count)), [], []
    while waiting or begun:
        if waiting and (not begun or rng.random() < 0.6):
            begun.append(waiting.pop(0))
            actions.append(Action("F", 0, begun[-1], version=0))
        else:
            actions.append(Action("B", 0, begun.pop(rng.randrange(len(begun))), version=0))
    return actions


def intervals(actions: Sequence[Action]) -> list[Interval]:
    made = {action.microbatch: i for i, action in enumerate(actions) if action.kind == "F"}
    return [(made[action.microbatch], i) for i, action in enumerate(actions) if action.kind == "B"]


def most_held(found: Sequence[Interval], evicted: Iterable[Interval]) -> int:
    """Activations on the device at the fullest computation, those that are on their way included."""
    gone = {(begin, end): set(range(begin + 2, end - 1)) for begin, end in evicted}
    last = max(end for _, end in found) + 1
    return max(
        sum(begin <= i <= end and i not in gone.get((begin, end), ()) for begin, end in found) for i in range(last)
    )


def test_no_choice_needs_fewer_transfers() -> None:
    rng, tight = random.Random(3), 0
    for _ in range(120):
        actions = random_list(rng, rng.randint(3, 8))
        found, capacity = intervals(actions), rng.randint(2, 6)
        least = next(
            (
                count
                for count in range(len(found) + 1)
                if any(most_held(found, some) <= capacity for some in itertools.combinations(found, count))
            ),
            None,
        )
        room = ActivationRoom((1,), (0,), (capacity,))
        if least is None:
            with pytest.raises(ScheduleError, match="--device-memory-budget-gb: rank 0 holds .* has room for"):
                plan(actions, frozenset(), room, capacity, "rank 0")
        else:
            assert len(plan(actions, frozenset(), room, capacity, "rank 0")) == least, " ".join(map(str, actions))
            tight += 0 < least < len(found)
    assert tight > 20


def every_order(count: int, kinds: str, begun: tuple[int, ...] = ()) -> Iterator[list[Action]]:
    """All legal orders of the computations of `count` micro-batches of one stage, which begin in order. begun: how many
    of each are done."""
    begun = begun or (0,) * count
    if all(done == len(kinds) for done in begun):
        yield []
    for number, done in enumerate(begun):
        if done < len(kinds) and (done or number == 0 or begun[number - 1]):
            after = (*begun[:number], done + 1, *begun[number + 1 :])
            for rest in every_order(count, kinds, after):
                yield [Action(kinds[done], 0, number, version=0), *rest]


@pytest.mark.parametrize(
    ("count", "kinds"),
    [
        (4, "FB"),
        (3, "FIW"),
        pytest.param(5, "FB", marks=pytest.mark.full),
        pytest.param(4, "FIW", marks=pytest.mark.full),
    ],
)
def test_no_order_has_a_choice_with_fewer_transfers(count: int, kinds: str) -> None:
    """Every order, every room, every choice of what leaves; behind I a third of the bytes waits for W."""
    seen = 0
    for actions in every_order(count, kinds):
        at = {(action.kind, action.microbatch): index for index, action in enumerate(actions)}
        lives = [(at["F", number], at[kinds[1], number]) for number in range(count)]
        waits = [(at["I", number], at["W", number]) for number in range(count)] if "I" in kinds else []
        base = [sum(begin < index <= end for begin, end in waits) for index in range(len(actions))]
        held = [[3 * (begin <= index <= end) for index in range(len(actions))] for begin, end in lives]
        away = [
            [h * (not begin + 1 < i < end - 1) for i, h in enumerate(row)]
            for row, (begin, end) in zip(held, lives, strict=True)
        ]
        peaks = {
            leaving: max(map(sum, zip(base, *((away if n in leaving else held)[n] for n in range(count)), strict=True)))
            for size in range(count + 1)
            for leaving in itertools.combinations(range(count), size)
        }
        for capacity in range(6, 3 * count + 2):
            least = min((len(leaving) for leaving, peak in peaks.items() if peak <= capacity), default=None)
            room = ActivationRoom((3,), (1,), (capacity,))
            try:
                assert len(plan(actions, frozenset(), room, capacity, "rank 0")) == least, " ".join(map(str, actions))
            except ScheduleError:
                assert least is None, " ".join(map(str, actions))
            seen += 1
    assert seen > 100


def least_recently_used(found: Sequence[Interval], capacity: int) -> int:
    """Evictions by the usual heuristic: what was made first goes first."""
    evicted: list[Interval] = []
    for i in range(max(end for _, end in found) + 1):
        now = [pair for pair in found if pair[0] <= i <= pair[1]]
        while most_held([pair for pair in now if pair not in evicted] or [(0, 0)], []) > capacity:
            free = [pair for pair in now if pair not in evicted and pair[0] + 1 < i < pair[1] - 1]
            evicted.append(min(free))
    return len(evicted)


def test_1f1b_moves_less_than_by_the_usual_heuristic() -> None:
    actions = [action for action in build_program("1f1b", 8, 32).unroll(1)[0] if action.is_compute]
    assert len(plan(actions, frozenset(), ActivationRoom((1,), (0,), (6,)), 6, "rank 0")) == 10
    assert least_recently_used(intervals(actions), 6) > 20


def moving(seed: int, count: int) -> list[tuple[Program, Program]]:
    """(Program, the same with transfers) of random shapes and capacities, where something moves."""
    rng, found = random.Random(seed), []
    for name, shape in random_shapes(20 * count, seed=seed, largest_rank=3):
        program = merge_backward(build_shape(name, shape))
        if program.asynchronous or program.recomputed:
            continue
        stages, ranks = program.num_stages, program.num_ranks
        whole = ActivationRoom(
            tuple(float(rng.randint(2, 5)) for _ in range(stages)), (1.0,) * stages, (float("inf"),) * ranks
        )
        batch = program.batch(0)
        peaks = [residency(program.order(rank, batch), frozenset(), whole).device for rank in range(ranks)]
        room = whole._replace(capacity=tuple(peak * rng.uniform(0.5, 1) for peak in peaks))
        try:
            changed = lower(insert_transfers(program, room))
            lists = changed.unroll(1)
        except ScheduleError:
            continue
        if any(action.kind == "EVICT" for actions in lists for action in actions):
            found.append((program, changed))
        if len(found) == count:
            break
    assert len(found) == count
    return found


def test_twenty_random_programs_keep_their_capacity_at_every_action() -> None:
    for program, changed in moving(5, 20):
        validate(changed)
        room = changed.room
        assert room is not None
        for rank, actions in enumerate(changed.unroll(1)):
            held: dict[tuple[int, int, int], float] = {}
            leaving: list[tuple[int, int, int]] = []
            for action in actions:
                key = (action.stage, action.replica, action.microbatch)
                if action.kind == "EVICT":
                    leaving.append(key)
                elif action.kind == "PREFETCH":
                    held[key] = room.full[action.stage]
                parts = list(action.computations())
                for part in parts:
                    here = (part.stage, part.replica, part.microbatch)
                    if part.kind == "F":
                        held[here] = room.full[part.stage]
                    assert here in held and (part.kind == "F" or here not in leaving), (program.name, str(part))
                assert sum(held.values()) <= room.capacity[rank], (program.name, str(action))
                for part in parts:
                    here = (part.stage, part.replica, part.microbatch)
                    if part.kind in "BW":
                        del held[here]
                    elif part.kind == "I":
                        held[here] = room.weight_only[part.stage]
                for gone in leaving if parts else ():
                    del held[gone]
                leaving = [] if parts else leaving
        computed = [[a for a in actions if a.is_compute] for actions in changed.unroll(2)]
        assert computed == [[a for a in actions if a.is_compute] for actions in lower(program).unroll(2)]


def broken(program: Program, rank: int, kind: str, copies: int) -> Program:
    """Without the rank's first action of that kind, or with it twice."""

    def order(r: int, batch: BatchRange) -> list[Action]:
        actions = program.order(r, batch)
        first = next((i for i, action in enumerate(actions) if action.kind == kind), None)
        if r != rank or first is None:
            return actions
        return [*actions[:first], *[actions[first]] * copies, *actions[first + 1 :]]

    return program.with_order(order)


@pytest.mark.parametrize(
    ("kind", "copies", "line"),
    [
        ("PREFETCH", 0, "V9 .* 0B4v0: its activations are on the host"),
        ("PREFETCH", 2, "V9 .* 0PREFETCH4: its activations are not on the host"),
        ("EVICT", 0, "V9 .* 0PREFETCH4: its activations are not on the host"),
        ("EVICT", 2, "V9 .* 0EVICT4: its activations are not on the device"),
    ],
)
def test_a_missing_or_doubled_transfer_is_refused(kind: str, copies: int, line: str) -> None:
    program = lower(insert_transfers(build_program("1f1b", 8, 16), ActivationRoom((1.0,) * 8, (0.0,) * 8, (6.0,) * 8)))
    validate(program)
    with pytest.raises(ScheduleError, match=line) as error:
        validate(broken(program, 0, kind, copies))
    assert "<-- HERE" in str(error.value)
    assert program.room is not None
    with pytest.raises(ScheduleError, match="V9 .* 6 of activations are held, 5 have room"):
        validate(replace(program, room=program.room._replace(capacity=(5.0,) * 8)))


def test_a_transfer_as_long_as_a_forward_costs_nothing() -> None:
    program = build_program("1f1b", 8, 32)
    changed = insert_transfers(program, ActivationRoom((1.0,) * 8, (0.0,) * 8, (5.0,) * 8))
    plain = simulate(program).makespan
    assert simulate(changed, Costs(transfer=Fraction(1))).makespan == plain
    for kind in ("EVICT", "PREFETCH"):  # each direction alone
        assert simulate(changed, Costs(exact={(0, kind): Fraction(9)})).makespan > plain
    slow = simulate(changed, Costs(transfer=Fraction(9)))
    busy = sum(span.end - span.start for span in slow.transfers if span.rank == 0 and span.action.kind == "PREFETCH")
    assert slow.makespan > plain and busy <= slow.makespan <= 2 * busy  # the link sets the pace


def test_an_asynchronous_program_keeps_its_activations() -> None:
    with pytest.raises(ScheduleError, match="--device-memory-budget-gb: 2bw never drains"):
        insert_transfers(build_program("2bw", 2, 4), ActivationRoom((1.0,) * 2, (0.0,) * 2, (2.0,) * 2))
