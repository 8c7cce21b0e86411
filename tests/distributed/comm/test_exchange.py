"""Large tensors over gloo travel as direct messages: right sums in the order of ranks, in place, several at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.comm import exchange
from megalite.comm.collectives import all_gather_into, reduce_scatter_into
from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.testing import run_ranks

SLICE = 300_000  # elements: above the size from which direct messages are used


def draw(rank: int, number: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(count, generator=generator).to(dtype)


def body(world: World, dtype: torch.dtype, async_op: bool) -> int:
    """Three reduce-scatters and then three all-gathers, all under way at once; how many went by direct messages."""
    axis = ParallelMesh.build(rank=world.rank, size=world.size)["dp"]
    direct = 0
    originals = exchange.start_reduce_scatter, exchange.start_all_gather

    def counted(out: Tensor, x: Tensor, axis: object, *, which: int) -> exchange.Exchange:
        nonlocal direct
        direct += 1
        return originals[which](out, x, axis)  # type: ignore[arg-type]

    exchange.start_reduce_scatter = lambda out, x, axis, sizes: counted(out, x, axis, which=0)  # type: ignore[assignment]
    exchange.start_all_gather = lambda out, x, axis, sizes: counted(out, x, axis, which=1)  # type: ignore[assignment]
    total = SLICE * axis.size
    wholes = [draw(axis.rank, number, total, dtype) for number in range(3)]
    slices = [whole[SLICE * axis.rank : SLICE * (axis.rank + 1)] for whole in wholes]
    handles = [reduce_scatter_into(out, x, axis, async_op=async_op) for out, x in zip(slices, wholes, strict=True)]
    for handle in handles:
        handle.wait()
    gathered = [torch.empty(total, dtype=dtype) for _ in range(3)]
    handles = [all_gather_into(out, x, axis, async_op=async_op) for out, x in zip(gathered, slices, strict=True)]
    for handle in reversed(handles):
        handle.wait()
    for number, got in enumerate(gathered):
        want = draw(0, number, total, dtype)
        for rank in range(1, axis.size):
            want += draw(rank, number, total, dtype)
        assert torch.equal(got, want)
    return direct


def unequal(world: World, sizes: list[int], async_op: bool) -> None:
    """Sums of parts that are not equal, some of them empty; gathered again."""
    axis = ParallelMesh.build(rank=world.rank, size=world.size)["dp"]
    whole = draw(axis.rank, 0, sum(sizes), torch.float32)
    own = whole.split(sizes)[axis.rank]
    reduce_scatter_into(own, whole, axis, sizes=sizes, async_op=async_op).wait()
    gathered = torch.full_like(whole, torch.nan)
    all_gather_into(gathered, own, axis, sizes=sizes, async_op=async_op).wait()
    want = draw(0, 0, sum(sizes), torch.float32)
    for rank in range(1, axis.size):
        want += draw(rank, 0, sum(sizes), torch.float32)
    assert torch.equal(gathered, want)


@pytest.mark.parametrize("sizes", [[5, 0, 300], [0, 0, 7], [64, 128, 64]], ids=str)
def test_unequal_and_empty_parts(sizes: list[int]) -> None:
    for async_op in (False, True):
        run_ranks(unequal, 3, sizes, async_op)


@pytest.mark.in_turn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_and_slices(size: int, dtype: torch.dtype) -> None:
    for async_op in (False, True):
        assert run_ranks(body, size, dtype, async_op) == [6] * size
