"""What the executor, the trainer and the checkpoint rely on: counted once, saved once, never silently stale."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.comm.collectives import all_reduce_
from megalite.comm.mesh import Axis, ParallelMesh
from megalite.comm.world import World
from megalite.gradient import GradSink, sink_of
from megalite.inventory.parameter_placement import ParameterPlacement
from megalite.parallel.zero import ParameterBuffers, ShardedOptimizer, StageOptions, ZeroOptions
from megalite.testing import run_ranks, run_single

TIED = "embedding.word_embeddings.weight"


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, eps=1e-5, fused=True)


def single_buffers(versions: list[list[tuple[str, nn.Parameter]]], **options: Any) -> ParameterBuffers:
    return ParameterBuffers(versions, axes=ParallelMesh.single().family(), options=ZeroOptions(**options))


def make_optimizer(buffers: ParameterBuffers) -> ShardedOptimizer:
    return ShardedOptimizer([buffers], make_optimizer=adamw, norm_axis=Axis.single("model"))


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    sink = sink_of(parameter)
    assert sink is not None
    sink.add(gradient)


def test_update_between_forward_and_backward_is_an_error() -> None:
    layer = nn.Linear(4, 4)
    buffers = single_buffers([[("layers.0.weight", layer.weight), ("layers.0.bias", layer.bias)]])
    optimizer = make_optimizer(buffers)
    x = torch.randn(3, 4, requires_grad=True)
    layer(x).sum().backward()
    loss = layer(x).square().sum()
    buffers.gradients.begin_batch()
    buffers.gradients.start_reduce()
    buffers.gradients.finish_reduce()
    optimizer.step(lr=0.1, weight_decay=0.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_versions_share_one_gradient_and_one_master() -> None:
    """PipeDream-2BW on two copies: the gradient at the old weights updates the newest, into the free slot."""
    copies = [nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2)]
    buffers = single_buffers([[("head.norm.weight", p)] for p in copies])
    optimizer = ShardedOptimizer(
        [buffers], make_optimizer=lambda g: torch.optim.SGD(g, momentum=0.0), norm_axis=Axis.single("model")
    )
    want = torch.tensor([1.0, 2.0])
    previous, current = want, want
    for step in range(5):
        source = copies[max(step - 1, 0) % 2]
        assert torch.allclose(source.detach(), previous)
        buffers.gradients.begin_batch()
        source.square().sum().backward()
        buffers.gradients.start_reduce()
        buffers.gradients.finish_reduce()
        optimizer.step(lr=0.1, weight_decay=0.0, version=(step + 1) % 2)
        previous, current = current, current - 0.1 * 2 * previous
        assert torch.allclose(copies[(step + 1) % 2].detach(), current)
    shards = {shard.name: shard.local for shard in [*optimizer.shards(), *optimizer.version_shards(0, "previous/")]}
    assert torch.allclose(shards["head.norm.weight"], current)
    assert torch.equal(shards["previous/head.norm.weight"], copies[0].detach())


def test_gradient_after_its_reduction_started_is_an_error() -> None:
    weight = nn.Parameter(torch.zeros(4))
    buffers = single_buffers([[("layers.0.weight", weight)]], overlap_grad_reduce=True)
    buffers.gradients.begin_batch(1)
    weight.sum().backward()
    with pytest.raises(AssertionError, match="after the last one of its batch"):
        weight.sum().backward()


def test_sink_overwrites_first_and_accumulates_then() -> None:
    sink = GradSink(torch.full((2, 2), math.nan))
    a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]])
    sink.addmm(a, b)
    sink.addmm(a, b)
    sink.add(torch.ones(2, 2))
    assert torch.equal(sink.grad, 2 * a @ b + 1)
    sink.reopen()
    assert torch.equal(sink.grad, torch.zeros(2, 2))


def test_gradients_of_the_last_batch_do_not_come_back() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    buffers = single_buffers([[("layers.0.a", used), ("layers.1.b", unused)]])
    optimizer = make_optimizer(buffers)
    for parameters in ([used, unused], [used]):
        buffers.gradients.begin_batch(1)
        for parameter in parameters:
            add_gradient(parameter, torch.ones(3))
        buffers.gradients.start_reduce()
        buffers.gradients.finish_reduce()
    assert float(optimizer.grad_norm()) == pytest.approx(math.sqrt(3.0))


# ---- tensor parallelism and tied parameters --------------------------------------------------------------------------


def tensor_parallel_parameters(tp: Axis) -> list[tuple[str, nn.Parameter]]:
    """A matrix split by rows over tp, a replicated bias, and a norm whose gradient is partial on each rank."""
    matrix = nn.Parameter(torch.ones(4 // tp.size, 6, dtype=torch.float64))
    bias, norm = (nn.Parameter(torch.ones(6, dtype=torch.float64)) for _ in range(2))
    places = [
        (matrix, ParameterPlacement((4, 6), (tp.rank * 4 // tp.size, 0), tp.names)),
        (bias, ParameterPlacement((6,), (0,), decay=False)),
        (norm, ParameterPlacement((6,), (0,), partial=tp.names, decay=False)),
    ]
    for parameter, placement in places:
        parameter.placement = placement  # type: ignore[attr-defined]
    return [("layers.0.matrix", matrix), ("layers.0.bias", bias), ("layers.0.norm", norm)]


def body_tensor_parallel(world: World, tp_size: int, stage: int) -> tuple[float, list[Any]]:
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, tp=tp_size)
    parameters = tensor_parallel_parameters(mesh["tp"])
    buffers = ParameterBuffers(
        [parameters],
        axes=mesh.family(),
        options=ZeroOptions(stage),
    )
    optimizer = ShardedOptimizer([buffers], make_optimizer=adamw, norm_axis=mesh.world)
    buffers.gradients.begin_batch(1)
    share = 1.0 / mesh.size("dp")
    for (_, parameter), part in zip(parameters, (1.0, 1.0, 1.0 / tp_size), strict=True):
        add_gradient(parameter, torch.full_like(parameter, 3.0 * share * part))
    buffers.gradients.start_reduce()
    buffers.gradients.finish_reduce()
    norm = float(optimizer.grad_norm())
    optimizer.step(lr=0.1, weight_decay=0.01)
    return norm, [(s.name, s.global_shape, s.offset, s.local, s.replica) for s in optimizer.shards()]


@pytest.mark.in_turn
@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_element_is_counted_and_saved_once(world: int, tp: int, stage: int) -> None:
    results = run_ranks(body_tensor_parallel, world, tp, stage)
    _, expected = run_single(body_tensor_parallel, 1, 0)
    want = {name: values for name, _, _, values, _ in expected}
    covered: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
    for norm, shards in results:
        assert norm == pytest.approx(3.0 * math.sqrt(4 * 6 + 6 + 6), rel=1e-14)
        for name, shape, offset, values, replica in shards:
            place = tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))
            joined = torch.cat([v.flatten() for n, _, _, v, _ in expected if n == name])
            assert torch.equal(values, joined.view(shape)[place]), name
            if replica == 0:
                counts = covered.setdefault(name, torch.zeros(shape))
                counts[place] += 1
    assert set(covered) == set(want)
    for name, counts in covered.items():
        assert torch.equal(counts, torch.ones_like(counts)), f"{name} is not written exactly once"


def body_tied(world: World, stage: int) -> tuple[float, Tensor, list[int]]:
    """Two pipeline ranks share a weight; each computes half of its gradient. (dp=2 where there are 4 ranks.)"""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=2)
    tied = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    own = nn.Parameter(torch.ones(5, dtype=torch.float64))
    buffers = ParameterBuffers(
        [[(TIED, tied), (f"layers.{mesh.coordinate('pp')}.bias", own)]],
        axes=mesh.family(),
        options=ZeroOptions(stage, overlap_grad_reduce=True),
        pipeline_stage=StageOptions(tied=frozenset({TIED}), counts_tied=mesh.coordinate("pp") == 0),
    )
    optimizer = ShardedOptimizer([buffers], make_optimizer=adamw, norm_axis=mesh.world)
    buffers.gradients.begin_batch(2)
    for _ in range(2):
        add_gradient(tied, torch.full_like(tied, 0.25 / mesh.size("dp")))
        add_gradient(own, torch.full_like(own, 0.5 / mesh.size("dp")))
    buffers.gradients.start_reduce()
    for gradient in buffers.gradients.tied():
        all_reduce_(gradient, mesh["pp"])
    buffers.gradients.start_tied_reduce()
    buffers.gradients.finish_reduce()
    norm = float(optimizer.grad_norm())
    optimizer.step(lr=0.1, weight_decay=0.0)
    buffers.weights.unshard()
    weights = tied.detach().clone()
    return norm, weights, [s.replica for s in optimizer.shards() if s.name == TIED]


@pytest.mark.parametrize(
    ("stage", "world"),
    [*((stage, 2) for stage in range(3)), *(pytest.param(s, 4, marks=pytest.mark.landing) for s in range(3)), (3, 4)],
)
def test_tied_parameters_are_summed_counted_once_and_stay_equal(world: int, stage: int) -> None:
    results = run_ranks(body_tied, world, stage)
    for norm, weights, _ in results:
        assert norm == pytest.approx(math.sqrt(4 * 3 + 5 + 5), rel=1e-14)
        assert torch.equal(weights, results[0][1])
    half = world // 2
    assert all(replica > 0 for _, _, replicas in results[half:] for replica in replicas)


def body_not_finite(world: World, stage: int) -> float:
    mesh = ParallelMesh.build(rank=world.rank, size=world.size)
    weight = nn.Parameter(torch.ones(300))
    buffers = ParameterBuffers(
        [[("layers.0.weight", weight)]],
        axes=mesh.family(),
        options=ZeroOptions(stage),
    )
    optimizer = ShardedOptimizer([buffers], make_optimizer=adamw, norm_axis=mesh.world)
    buffers.gradients.begin_batch(1)
    gradient = torch.ones(300)
    gradient[7] = math.inf if world.rank == 1 else 1.0
    add_gradient(weight, gradient)
    buffers.gradients.start_reduce()
    buffers.gradients.finish_reduce()
    return float(optimizer.grad_norm())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_ranks_see_an_overflow_of_one(stage: int) -> None:
    assert not any(math.isfinite(norm) for norm in run_ranks(body_not_finite, 2, stage))
