"""Collectives through shared memory give what torch.distributed gives, in any order of waiting, and leave nothing."""

from __future__ import annotations

import os
import platform
import re
import time
from typing import Any

import pytest
import torch

from megalite.comm import collectives
from megalite.comm.mesh import Axis, ParallelMesh
from megalite.comm.shared_memory import DEPTH, SLOT_BYTES, share_axis
from megalite.comm.world import World
from megalite.testing import run_ranks, try_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
ELEMENTS = SLOT_BYTES // 4


def axes(world: World, timeout: float = 20.0) -> tuple[Axis, Axis]:
    """The same ranks, through shared memory and through gloo."""
    plain = ParallelMesh.build(rank=world.rank, size=world.size, tp=world.size)["tp"]
    shared = share_axis(plain, timeout=timeout)
    assert shared.shared is not None
    return shared, plain


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 10).to(dtype)


def body_compare(world: World) -> None:
    shared, plain = axes(world)
    for dtype in DTYPES:
        for shape in ((), (1,), (world.size * 3, 5), (world.size * 2, 3 * ELEMENTS // 2 // world.size + 7)):
            x = values(world.rank, shape, dtype)
            everyone = [values(rank, shape, dtype) for rank in range(world.size)]
            total = everyone[0].clone()
            for other in everyone[1:]:  # in the order of ranks: the very same rounding
                total += other
            for op in ("sum", "max", "min"):
                mine, theirs = x.clone(), x.clone()
                collectives.all_reduce_(mine, shared, op=op)  # type: ignore[arg-type]
                collectives.all_reduce_(theirs, plain, op=op)  # type: ignore[arg-type]
                loose = 0.25 if dtype == torch.bfloat16 else 1e-5  # gloo adds in an order of its own
                torch.testing.assert_close(mine, theirs, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=loose)
                assert op != "sum" or torch.equal(mine, total)
            if not shape:
                continue
            assert torch.equal(collectives.all_gather(x, shared), torch.cat(everyone))
            if shape[0] % world.size == 0:
                part = collectives.reduce_scatter(x, shared)
                assert torch.equal(part, total.chunk(world.size)[world.rank])
    strided = values(world.rank, (6, 8), torch.float64).t()
    collectives.all_reduce_(strided, shared)
    assert torch.equal(strided, sum(values(rank, (6, 8), torch.float64).t() for rank in range(world.size)))


def body_rows(world: World, traffic: list[list[int]], width: int) -> None:
    """Rows to each rank, several in flight, through memory and through gloo."""
    shared, plain = axes(world)
    for dtype in DTYPES:
        x = values(world.rank, (sum(traffic[world.rank]), width), dtype)
        started = [collectives.start_all_to_all_rows(x + i, traffic, shared) for i in range(3)]
        for i, (rows, handle) in enumerate(started):
            handle.wait()
            expected, other = collectives.start_all_to_all_rows(x + i, traffic, plain)
            other.wait()
            assert torch.equal(rows, expected)


@pytest.mark.parametrize(
    ("traffic", "width"),
    [([[3, 4], [0, 2]], 5), ([[0, 9], [5, 0]], ELEMENTS // 3), ([[0, 0, 0], [7, 1, 0], [2, 3, 0]], 8)],
)
def test_rows_go_where_gloo_brings_them(traffic: list[list[int]], width: int) -> None:
    run_ranks(body_rows, len(traffic), traffic, width)


@pytest.mark.in_turn
@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_agrees_with_gloo(size: int) -> None:
    run_ranks(body_compare, size)


def body_pending(world: World) -> list[float]:
    """More messages in flight than there are slots, waited for in the wrong order, ranks at different speeds."""
    shared, _ = axes(world)
    tensors = [torch.full((ELEMENTS // 2 + i,), float(world.rank + i)) for i in range(3 * DEPTH)]
    handles = []
    for i, tensor in enumerate(tensors):
        if (i + world.rank) % 5 == 0:
            time.sleep(0.01)
        handles.append(collectives.all_reduce_(tensor, shared, async_op=True))
    for handle in reversed(handles):
        handle.wait()
    return [float(tensor[-1]) for tensor in tensors]


def test_any_number_of_messages_may_be_under_way() -> None:
    expected = [2.0 * i + 1.0 for i in range(3 * DEPTH)]
    assert run_ranks(body_pending, 2) == [expected, expected]


def body_leftovers(world: World) -> list[str]:
    shared, plain = axes(world)
    collectives.barrier(plain)
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"megalite-{os.getpid()}-")]


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm on this system")
def test_no_file_is_left_even_while_ranks_run() -> None:
    assert run_ranks(body_leftovers, 2) == [[], []]


def body_silent(world: World) -> None:
    shared, _ = axes(world, timeout=0.3)
    if world.rank == 0:
        collectives.all_reduce_(torch.ones(3), shared)
    else:
        time.sleep(5)


def test_a_silent_rank_is_named() -> None:
    case = try_ranks(body_silent, 2)
    assert case.describe().startswith("rank 1 did not finish")
    lost = rf"rank 1 \(host {re.escape(platform.node())}, tp coordinate 1\) has not answered for 0 s"
    assert re.search(f"rank 0 failed: PeerLost: {lost}", case.describe())


def body_elsewhere(world: World, change: dict[str, Any]) -> bool:
    import megalite.comm.shared_memory as module

    if world.rank == 1 and "host" in change:
        module.machine_id = lambda: change["host"]  # type: ignore[assignment]
    if world.rank == 0 and "create" in change:
        module._create = lambda folder, total: None  # type: ignore[assignment]
    plain = ParallelMesh.build(rank=world.rank, size=world.size, tp=world.size)["tp"]
    axis = share_axis(plain)
    x = torch.ones(2)
    collectives.all_reduce_(x, axis)
    assert x.tolist() == [2.0, 2.0]
    return axis.shared is None and axis == plain


@pytest.mark.parametrize("change", [{"host": "another"}, {"create": None}])
def test_where_memory_cannot_be_shared_gloo_carries_on(change: dict[str, Any]) -> None:
    assert run_ranks(body_elsewhere, 2, change) == [True, True]
