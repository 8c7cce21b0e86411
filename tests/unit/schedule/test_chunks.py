"""Which weights are on the device when: as few transfers as any choice needs, never more than has room."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest

from megalite.errors import ScheduleError
from megalite.schedule import SCHEDULES, Costs, build_program, lower, merge_backward, simulate, validate
from megalite.schedule.chunks import chunk_faults, moves_for, plan_chunks, sizes_of, uses_of, with_chunks
from megalite.schedule.program import Program, WeightChunks


def chunks_of(program: Program, layers: int, capacity: int | None = None, size: int = 1) -> WeightChunks:
    """Every stage has so many layers of one size."""
    stages, forward = program.num_stages, tuple((layer,) for layer in range(layers))
    room = None if capacity is None else (capacity,) * program.num_ranks
    sizes, gradients = ((size,) * layers,) * stages, ((0, 0),) * stages
    return WeightChunks(sizes, (forward,) * stages, (forward[::-1],) * stages, gradients, room)


def fewest(wanted: Sequence[Sequence[int]], room: int) -> int:
    """Transfers of the best choice, by trying all: before each use what is wanted comes, and anything may leave."""

    @cache
    def best(index: int, there: frozenset[int]) -> int:
        if index == len(wanted):
            return 0
        now = frozenset(wanted[index])
        came, others = now - there, sorted(there - now)
        kept = (frozenset(o for i, o in enumerate(others) if mask >> i & 1) for mask in range(1 << len(others)))
        return len(came) + min(best(index + 1, now | keep) for keep in kept if len(now | keep) <= room)

    return best(0, frozenset())


def least_recently_used(wanted: Sequence[Sequence[object]], room: int) -> int:
    there: dict[object, None] = {}
    transfers = 0
    for keys in wanted:
        for key in keys:
            transfers += key not in there
            there.pop(key, None)
            there[key] = None
            if len(there) > room:
                del there[next(iter(there))]
    return transfers


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_needs_fewer_transfers(seed: int) -> None:
    rng = random.Random(seed)
    number = rng.randint(3, 8)
    wanted = [tuple(rng.sample(range(number), rng.choice([1, 1, 1, 2]))) for _ in range(rng.randint(8, 16))]
    room = rng.randint(2, number)
    moves = moves_for(wanted, dict.fromkeys(range(number), 1), room, ahead=False)
    assert sum(len(come) for _, come in moves) == fewest(wanted, room)


def test_calling_one_use_ahead_costs_one_place() -> None:
    """What comes early takes a place, but is needed anyway: with one place more nothing comes more often."""
    rng = random.Random(3)
    wanted = [(rng.randrange(8),) for _ in range(200)]
    sizes = dict.fromkeys(range(8), 1)
    for room in range(2, 8):
        early = sum(len(come) for _, come in moves_for(wanted, sizes, room + 1))
        late = sum(len(come) for _, come in moves_for(wanted, sizes, room, ahead=False))
        assert early <= late


@pytest.mark.parametrize(
    ("ranks", "room", "best", "looking_back"), [(8, 4, 268, 316), (8, 7, 73, 169), (1, 4, 260, 260)]
)
def test_1f1b_against_the_least_recently_used(ranks: int, room: int, best: int, looking_back: int) -> None:
    """PatrickStar's comparison, on the first rank of a pipeline: 8 layers, 32 micro-batches. The warm-up's forwards
    walk round and round, where looking back lets go of just what comes next; alone, a rank walks up and down, where
    looking back does as well."""
    program = merge_backward(build_program("1f1b", ranks, 32))
    chunks = chunks_of(program, 8)
    wanted = [keys for _, keys in uses_of(program.order(0, program.batch(0, last=True)), chunks)]
    moves = moves_for(wanted, sizes_of(chunks), room, ahead=False)
    assert sum(len(come) for _, come in moves) == best
    assert least_recently_used(wanted, room) == looking_back


def programs() -> Iterator[tuple[Program, int]]:
    rng = random.Random(7)
    names = [name for name, schedule in SCHEDULES.items() if not schedule.asynchronous]
    for _ in range(20):
        name = rng.choice(names)
        ranks = rng.choice([2, 4])
        number = max(SCHEDULES[name].min_chunks, 2 if name in ("interleaved", "breadth-first") else 1)
        program = merge_backward(build_program(name, ranks, 4 * ranks, number if number > 1 else None))
        layers = rng.randint(1, 5)
        room = rng.randint(2, layers * program.placement.chunks_per_rank + 2)
        yield with_chunks(program, chunks_of(program, layers, 7 * room, size=7)), layers


@pytest.mark.parametrize(("program", "layers"), list(programs()))
def test_twenty_random_programs_keep_to_their_room(program: Program, layers: int) -> None:
    assert program.chunks is not None and program.chunks.capacity is not None
    validate(lower(program))
    for rank in range(program.num_ranks):
        actions = program.order(rank, program.batch(0, last=True))
        plan = plan_chunks(program, rank, actions)
        sizes = sizes_of(program.chunks, program.placement.num_replicas)
        assert not list(chunk_faults(plan, sizes, program.chunks.capacity[rank]))
        assert [use.wanted for use in plan] == [keys for _, keys in uses_of(actions, program.chunks)]


def test_what_is_wrong_is_named() -> None:
    program = merge_backward(build_program("1f1b", 2, 4))
    program = with_chunks(program, chunks_of(program, 4, 2))
    plan = plan_chunks(program, 0, program.order(0, program.batch(0, last=True)))
    assert program.chunks is not None
    sizes = sizes_of(program.chunks)
    assert not list(chunk_faults(plan, sizes, 2))
    found = [wrong for _, wrong in chunk_faults(plan, sizes, 1)]
    assert found and all("have room" in wrong for wrong in found)
    late = [use._replace(come=()) if index == 3 else use for index, use in enumerate(plan)]
    assert any("are read, and are on the host" in wrong for _, wrong in chunk_faults(late, sizes, 2))
    kept = [use._replace(leave=()) if index == 3 else use for index, use in enumerate(plan)]
    assert any("have room" in wrong for _, wrong in chunk_faults(kept, sizes, 2))
    with pytest.raises(ScheduleError, match="give more"):
        validate(with_chunks(program, chunks_of(program, 4, 1)._replace(sizes=((2,) * 4,) * 2)))


@pytest.mark.parametrize(("byte", "makespan"), [(0, 12), (1, 13), (2, 17)])
def test_a_transfer_hides_behind_a_computation(byte: int, makespan: int) -> None:
    """One micro-batch, 4 layers of one unit forward and two backward, room for two: max(compute, transfer).

    Layers 0 to 3 come, then 1 and 0 once more. At 1 a byte only the first is waited for; at 2 the forward is as long as
    its transfers and the last layer's computation, 9, and the backward hides its own.
    """
    program = merge_backward(build_program("1f1b", 1, 1))
    program = with_chunks(program, chunks_of(program, 4, 2))
    costs = Costs(
        forward=Fraction(4), backward_input=Fraction(4), backward_weight=Fraction(4), host_byte=Fraction(byte)
    )
    assert simulate(program, costs).makespan == makespan


def test_an_asynchronous_program_is_refused() -> None:
    program = build_program("2bw", 2, 4)
    with pytest.raises(ScheduleError, match="two versions"):
        with_chunks(program, chunks_of(program, 2))
    assert replace(program).chunks is None
