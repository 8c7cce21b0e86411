"""A master kept as bf16 weight and 16-bit remainder is the same master, bit for bit."""

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
from megalite.parallel.zero.param_remainders import join_bits, split_bits
from megalite.testing import run_ranks


def test_split_and_join_are_inverse() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 3.0e38, -3.0e38, 1e-45, torch.inf, -torch.inf])
    halves = (torch.arange(1000, dtype=torch.int32) << 16) + 0x8000
    master = torch.cat([bits.view(torch.float32), special, halves.view(torch.float32)])
    master = master[master.isfinite() & (master.abs() < 3.3e38)]
    weights = torch.empty(master.shape, dtype=torch.bfloat16)
    remainder = torch.empty(master.shape, dtype=torch.int16)
    split_bits(master, weights, remainder)
    back = torch.empty_like(master)
    join_bits(weights, remainder, back)
    assert torch.equal(back.view(torch.int32), master.view(torch.int32))
    nearest = master.to(torch.bfloat16)
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weights[~tie], nearest[~tie]), "the weight is the nearest bf16"
    assert int(tie.sum()) >= 1000 and bool((weights[tie].float().abs() > master[tie].abs()).all()), "documented"
    assert not torch.equal(weights[tie], nearest[tie])


def body(world: World, stage: int, remainders: bool) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """Masters and moments after three steps and a trip through the checkpoint's views, bytes held, elements owned."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size)
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)).to(torch.bfloat16)
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
        store_param_remainders=remainders,
    )
    held = optimizer.memory()
    for step in range(3):
        buffers.gradients.begin_batch(1)
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + mesh.coordinate("dp"))).bfloat16()
        for layer in layers:
            x = layer(x).tanh()
        x.square().mean().backward()
        buffers.gradients.start_reduce()
        buffers.gradients.finish_reduce()
        optimizer.step(lr=0.003, weight_decay=0.1)
        if step == 1:  # save, spoil, load
            saved = [shard.local.clone() for shard in optimizer.shards()]
            buffers.weights.wait()
            for shard in optimizer.shards():
                shard.local.fill_(7.0)
            optimizer.after_load()
            for shard, values in zip(optimizer.shards(), saved, strict=True):
                shard.local.copy_(values)
            optimizer.after_load()
    shards = {f"{shard.name}{shard.offset}": shard.local.clone() for shard in optimizer.shards()}
    return shards, held, sum(s.stop - s.start for s in optimizer.masters)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_with_remainders_changes_no_bit(stage: int) -> None:
    plain, packed = run_ranks(body, 2, stage, False), run_ranks(body, 2, stage, True)
    for (want, full, owned), (got, half, _) in zip(plain, packed, strict=True):
        assert want.keys() == got.keys()
        assert all(torch.equal(want[name], got[name]) for name in want)
        assert full["master"] == 4 * owned and half["master"] == 2 * owned
