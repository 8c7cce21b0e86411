"""Belady's choice against every other one, on traces small enough to try them all."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest

from megalite.schedule import belady

NEVER = float("inf")


def fewest_loads(trace: tuple[int, ...], room: int) -> int:
    """Loads with the best of all evictions."""

    @cache
    def best(index: int, there: frozenset[int]) -> int:
        if index == len(trace):
            return 0
        key = trace[index]
        if key in there:
            return best(index + 1, there)
        left = [there] if len(there) < room else [there - {gone} for gone in there]
        return 1 + min(best(index + 1, rest | {key}) for rest in left)

    return best(0, frozenset())


def loads(trace: tuple[int, ...], room: int) -> int:
    there: list[int] = []
    count = 0
    for index, key in enumerate(trace):
        if key in there:
            continue
        count += 1
        later = trace[index + 1 :]
        next_uses = [later.index(held) if held in later else NEVER for held in there]
        gone = belady(next_uses, [1] * len(there), held=len(there) + 1, room=room)
        there = [held for position, held in enumerate(there) if position not in gone] + [key]
        assert len(there) <= room
    return count


def test_no_choice_needs_fewer_loads() -> None:
    rng = random.Random(11)
    some_left = 0
    for _ in range(300):
        number, room = rng.randint(2, 7), rng.randint(1, 5)
        trace = tuple(rng.randrange(number) for _ in range(rng.randint(1, 14)))
        assert loads(trace, room) == fewest_loads(trace, room), (trace, room)
        some_left += len(set(trace)) > room
    assert some_left > 100


def test_every_trace_of_three_things() -> None:
    for trace in itertools.product(range(3), repeat=7):
        for room in (1, 2):
            assert loads(trace, room) == fewest_loads(trace, room), (trace, room)


@pytest.mark.parametrize(
    ("next_uses", "held", "room", "sizes", "leave"),
    [
        ([], 3, 3, None, []),
        ([], 4, 3, None, []),  # nothing may leave: the caller sees that it is not enough
        ([5, 9, 7], 3, 3, None, []),
        ([5, 9, 7], 4, 3, None, [1]),
        ([5, 9, 7], 5, 3, None, [1, 2]),
        ([5, 9, 7], 9, 3, None, [1, 2, 0]),
        ([NEVER, 9, NEVER], 5, 4, None, [0]),
        ([9, NEVER, NEVER], 6, 4, None, [1, 2]),
        ([5, 9, 7], 10, 6, [4, 1, 3], [1, 2]),  # the farthest goes, if something nearer were larger, too
        ([5, 9, 7], 10, 9.5, [4, 0.25, 0.25], [1, 2]),
    ],
)
def test_what_leaves(
    next_uses: list[float], held: float, room: float, sizes: list[float] | None, leave: list[int]
) -> None:
    assert belady(next_uses, sizes or [1] * len(next_uses), held=held, room=room) == leave
