"""Ranks tell each other JSON of any length: short texts in one collective, longer ones in two."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.comm import gathered_json
from megalite.comm.collectives import barrier
from megalite.comm.gathered_json import GatheredJson, all_gather_json
from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.testing import run_ranks

SLOT = 1024  # what travels in the first collective; a JSON string is two quotes longer than its text


def text(rank: int, length: int) -> str:
    return "".join(chr(ord("a") + (rank + index) % 26) for index in range(length))


def gather(world: World, lengths: list[int]) -> tuple[list[Any], int]:
    axis = ParallelMesh.build(rank=world.rank, size=world.size).world
    calls, original = [], gathered_json.all_gather_into

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return original(*args, **options)

    gathered_json.all_gather_into = counted
    pending = GatheredJson(text(axis.rank, lengths[axis.rank]), axis)
    values = pending.wait()
    barrier(axis)
    return values, len(calls)


@pytest.mark.parametrize(
    ("lengths", "collectives_needed"),
    [([0, 5, 0], 1), ([SLOT - 2, 1, 2], 1), ([SLOT - 1, 1, 2], 2), ([3, 10 * SLOT, SLOT - 2], 2), ([0, 700_000, 9], 2)],
)
def test_every_rank_hears_every_text(lengths: list[int], collectives_needed: int) -> None:
    expected = [text(rank, length) for rank, length in enumerate(lengths)]
    assert run_ranks(gather, 3, lengths) == [(expected, collectives_needed)] * 3


def everything(world: World) -> list[Any]:
    axis = ParallelMesh.build(rank=world.rank, size=world.size).world
    return all_gather_json({"rank": axis.rank, "none": None, "unicode": "é" * axis.rank * 700}, axis)


def test_values_of_any_kind() -> None:
    expected = [{"rank": rank, "none": None, "unicode": "é" * rank * 700} for rank in range(2)]
    assert run_ranks(everything, 2) == [expected] * 2
