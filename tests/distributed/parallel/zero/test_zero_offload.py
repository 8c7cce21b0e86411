"""Optimizer state in host memory changes where numbers are, not the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.config import OptimizerConfig
from megalite.optim import OPTIMIZERS
from megalite.parallel.zero import ParameterBuffers, ShardedOptimizer, ZeroOptions
from megalite.testing import run_ranks, run_single


def body(
    world: World, stage: int, fraction: float, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """Weights after three clipped steps, bytes held, elements owned."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size) if world.size > 1 else ParallelMesh.single()
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)).to(dtype)
    named = [(f"layers.{i}.{n}", p) for i, layer in enumerate(layers) for n, p in layer.named_parameters()]
    buffers = ParameterBuffers(
        [named],
        axes=mesh.family(),
        options=ZeroOptions(stage, bucket_size=1000),
    )
    buffers.weights.attach(list(layers))
    optimizer = ShardedOptimizer(
        [buffers],
        make_optimizer=lambda groups: OPTIMIZERS["adam"](groups, OptimizerConfig(lr=1.0)),
        norm_axis=mesh.world,
        offload_fraction=fraction,
    )
    for step in range(3):
        buffers.gradients.begin_batch(1)
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + mesh.coordinate("dp"))).to(dtype)
        for layer in layers:
            x = layer(x).tanh()
        x.square().mean().backward()
        buffers.gradients.start_reduce()
        buffers.gradients.finish_reduce()
        scale = 0.5 / (optimizer.grad_norm() + 1e-6)
        optimizer.step(lr=0.01, weight_decay=0.1, grad_scale=scale)
    buffers.weights.unshard()
    weights = {name: p.detach().clone() for name, p in named}
    return weights, optimizer.memory(), sum(s.stop - s.start for s in optimizer.masters)


@pytest.mark.in_turn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_offloading_changes_no_bit(stage: int, dtype: torch.dtype) -> None:
    plain = run_ranks(body, 2, stage, 0.0, dtype)
    for fraction in (0.5, 1.0):
        for (want, _, _), (got, held, owned) in zip(plain, run_ranks(body, 2, stage, fraction, dtype), strict=True):
            assert all(torch.equal(want[name], got[name]) for name in want)
            assert held["offloaded"] >= fraction * 12 * owned
            if fraction == 1.0:
                assert held["master"] == held["state"] == 0


def test_the_fraction_decides_how_much_moves() -> None:
    sizes = [run_single(body, 0, fraction, torch.float32)[1]["offloaded"] for fraction in (0.0, 0.25, 0.5, 1.0)]
    assert sizes[0] == 0 and sizes == sorted(set(sizes))
