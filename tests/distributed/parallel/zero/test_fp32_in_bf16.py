"""Parameters in fp32 inside a bf16 stage are a family of their own: they keep their precision at every layout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.nn.norm import Norm
from megalite.parallel.zero import ShardedOptimizer, ZeroOptions, stage_buffers
from megalite.testing import run_ranks, run_single
from megalite.train.run import open_run

LR, DECAY = 1e-2, 0.1


class Gated(nn.Module):
    """A bf16 matrix and an fp32 gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
        self.gate = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(F.linear(x.float(), self.gate.weight))
        return x + (torch.tanh(self.linear(x)) * gate).to(x.dtype)


def gated_layers() -> tuple[list[Gated], list[tuple[str, nn.Parameter]]]:
    torch.manual_seed(0)
    layers = [Gated(16) for _ in range(3)]
    return layers, [(f"layers.{i}.{n}", p) for i, layer in enumerate(layers) for n, p in layer.named_parameters()]


def gated_loss(layers: list[Gated], step: int, sample: int) -> Tensor:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + sample)).bfloat16()
    for layer in layers:
        x = layer(x)
    return x.float().square().mean()


def body_gated(world: World, options: list[ZeroOptions]) -> list[tuple[list[float], dict[str, Tensor], list[str]]]:
    """For each of the options norms, masters, and the dtypes of the families in their order."""
    found = []
    mesh = ParallelMesh.build(rank=world.rank, size=world.size)
    for option in options:
        layers, named = gated_layers()
        buffers = stage_buffers([named], {"dense": mesh.family()}, options=option)
        buffers[0].weights.attach(layers, *(family.weights for family in buffers[1:]))
        optimizer = ShardedOptimizer(
            buffers, make_optimizer=lambda g: torch.optim.AdamW(g, eps=1e-5, fused=True), norm_axis=mesh.world
        )
        norms = []
        for step in range(3):
            for family in buffers:
                family.gradients.begin_batch(2 // world.size)
            for sample in range(world.rank, 2, world.size):
                gated_loss(layers, step, sample).backward()
            for family in buffers:
                family.gradients.start_reduce()
            for family in buffers:
                family.gradients.finish_reduce()
            norms.append(float(optimizer.grad_norm()))
            optimizer.step(lr=LR, weight_decay=DECAY)
        masters = {name: torch.full(p.shape, math.nan) for name, p in named}
        for shard in optimizer.shards():
            if shard.name in masters:
                place = tuple(slice(a, a + n) for a, n in zip(shard.offset, shard.local.shape, strict=True))
                masters[shard.name][place] = shard.local
        for family in buffers:
            family.weights.unshard()
        for name, p in named:  # what computes is the master, in the family's own precision
            kept = ~masters[name].isnan()
            assert torch.equal(p.detach()[kept], masters[name].to(p.dtype)[kept]), name
        found.append((norms, masters, [str(family.dtype) for family in buffers]))
    return found


def gated_oracle() -> tuple[list[float], dict[str, Tensor]]:
    layers, named = gated_layers()
    masters = {name: nn.Parameter(p.detach().float()) for name, p in named}
    rule = torch.optim.AdamW(masters.values(), lr=LR, eps=1e-5, weight_decay=DECAY)
    norms = []
    for step in range(3):
        total = {name: torch.zeros(p.shape) for name, p in named}
        for sample in range(2):
            for _, p in named:
                p.grad = None
            gated_loss(layers, step, sample).backward()
            for name, p in named:
                assert p.grad is not None
                total[name] += p.grad.float()
        for name, p in masters.items():
            p.grad = total[name]
        norms.append(float(torch.nn.utils.get_total_norm(total.values())))
        rule.step()
        with torch.no_grad():
            for name, p in named:
                p.copy_(masters[name])
    return norms, {name: p.detach() for name, p in masters.items()}


def test_fp32_parameters_inside_a_bf16_stage_keep_their_precision_at_every_zero_stage() -> None:
    options = [ZeroOptions(stage, overlap, overlap) for stage in range(4) for overlap in (False, True)]
    want_norms, want = gated_oracle()
    for world_size in (1, 2):
        by_rank = run_ranks(body_gated, 2, options) if world_size == 2 else [run_single(body_gated, options)]
        for option, *results in zip(options, *by_rank, strict=True):
            covered = {name: torch.zeros_like(values) for name, values in want.items()}
            for norms, masters, dtypes in results:
                assert dtypes == ["torch.bfloat16", "torch.float32"]
                assert norms == pytest.approx(want_norms, rel=1e-4), option
                for name, values in masters.items():
                    known = ~values.isnan()
                    covered[name] += known
                    assert torch.allclose(values[known], want[name][known], rtol=1e-4, atol=1e-5), (option, name)
            assert all(bool((counts > 0).all()) for counts in covered.values())


RUN = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --global-batch-size 4 "
    "--micro-batch-size 2 --train-iters 9 --lr 1e-2 --clip-grad 0 --bf16 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 61 --eval-iters 0 --num-workers 0 --untie-embeddings-and-output-weights --no-exit-signal-handler"
).split()


def body_run(world: World, flags: list[str]) -> tuple[list[float], list[tuple[str, int]]]:
    """Losses of a run whose norms are kept in fp32, and (dtype, number of parameters) of its families."""
    make, compute = Norm.__init__, Norm.forward

    def in_fp32(self: Norm, size: int, config: Any, ctx: Any, **more: Any) -> None:
        make(self, size, config, replace(ctx, dtype=torch.float32), **more)

    with (
        patch.object(Norm, "__init__", in_fp32),
        patch.object(Norm, "forward", lambda self, x: compute(self, x).to(x.dtype)),
        open_run(parse([*RUN, *flags], world_size=world.size), world) as run,
    ):
        losses = [float(run.trainer.train_step(drain=step == 2).lm_loss) for step in range(3)]
        families = run.state.model.optimizer.buffers
        return losses, [(str(f.dtype), sum(len(bucket.plan.ranges) for bucket in f.buckets)) for f in families]


def test_a_run_with_norms_in_fp32_is_the_same_at_every_layout() -> None:
    losses, families = run_single(body_run, [])
    assert families == [("torch.bfloat16", 4 * 8 + 3), ("torch.float32", 4 * 4 + 2)]
    pipeline = ["--pipeline-model-parallel-size", "2"]
    for flags in (pipeline, ["--zero-stage", "1"], ["--zero-stage", "3"]):
        for found, held in run_ranks(body_run, 2, flags):
            assert found == losses, flags
            assert [dtype for dtype, _ in held] == ["torch.bfloat16", "torch.float32"]
    for found, _ in run_ranks(body_run, 2, [*pipeline, "--pipeline-schedule", "2bw"]):
        assert found[0] == losses[0] and all(map(math.isfinite, found))


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (4, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --zero-stage 2"),
        (4, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --zero-stage 3"),
        (4, "--pipeline-model-parallel-size 2 --pipeline-schedule chimera --zero-stage 1"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1"),
        (2, "--zero-stage 1 --optimizer-state param_remainders"),
        (2, "--zero-stage 1 --offload optimizer"),
        (2, "--zero-stage 1 --optimizer adafactor"),
        (2, "--zero-stage 1 --optimizer muon"),
    ],
)
def test_families_get_along_with_everything_else(world_size: int, flags: str) -> None:
    argv = [*flags.split(), "--micro-batch-size", "1", "--global-batch-size", "8"]
    optimizer = argv[argv.index("--optimizer") :][:2] if "--optimizer" in argv else []
    want, _ = run_single(body_run, [*argv[-4:], *optimizer])
    for found, _ in run_ranks(body_run, world_size, argv):
        assert found == pytest.approx(want, rel=1e-3)
