"""Every ZeRO stage trains exactly as plain torch in one process does (fp64, 1e-12); stage 1 is stage 0 bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.parallel.zero import ParameterBuffers, ShardedOptimizer, ZeroOptions
from megalite.testing import run_ranks, run_single

WIDTH, STEPS, BATCH = 24, 3, 4
LR, DECAY = 1e-2, 0.1
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=LR, eps=1e-5, weight_decay=0.0, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=LR, momentum=0.9),
}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return y


def make_layers(dtype: torch.dtype = torch.float64) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(7, WIDTH), Layer(WIDTH), Layer(WIDTH), nn.Linear(WIDTH, 5, bias=False)])
    return layers.to(dtype)


def named(layers: nn.ModuleList) -> list[tuple[str, nn.Parameter]]:
    """Logical names as a model gives them: `embedding.*`, `layers.i.*`, `head.*`."""
    prefixes = ["embedding", "layers.0", "layers.1", "head"]
    return [(f"{p}.{n}", v) for p, layer in zip(prefixes, layers, strict=True) for n, v in layer.named_parameters()]


def loss_of(layers: Iterable[nn.Module], step: int, sample: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Loss of one micro-batch of one sample, divided by the samples of the whole batch."""
    generator = torch.Generator().manual_seed(1000 * step + sample)
    x = torch.randn(3, 7, generator=generator, dtype=torch.float64).to(dtype)
    for layer in layers:
        x = layer(x)
    return x.square().mean() / BATCH


def reference(optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient norms and final weights of plain torch in one process."""
    layers = make_layers()
    parameters = named(layers)
    rule = OPTIMIZERS[optimizer](
        [
            {"params": [p for _, p in parameters if p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for _, p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
    )
    norms = []
    for step in range(STEPS):
        rule.zero_grad()
        for sample in range(BATCH):
            loss_of(layers, step, sample).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for _, p in parameters if p.grad is not None])))
        rule.step()
    return norms, {name: p.detach() for name, p in parameters}


@dataclass(frozen=True)
class Case:
    stage: int
    overlap: bool = True
    bucket_size: int | None = None
    optimizer: str = "adamw"
    microbatches: int | None = None
    counted: bool = True
    replicate: int = 1


def train(world: World, case: Case, dtype: torch.dtype = torch.float64) -> tuple[list[float], dict[str, Tensor]]:
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, dp_replicate=case.replicate)
    layers = make_layers(dtype)
    buffers = ParameterBuffers(
        [named(layers)],
        axes=mesh.family(),
        options=ZeroOptions(case.stage, case.overlap, case.overlap, case.bucket_size),
    )
    buffers.weights.attach(list(layers))
    optimizer = ShardedOptimizer([buffers], make_optimizer=OPTIMIZERS[case.optimizer], norm_axis=mesh.world)
    per_rank = BATCH // mesh.size("dp")
    pieces = case.microbatches or per_rank
    norms = []
    for step in range(STEPS):
        buffers.gradients.begin_batch(pieces if case.counted else None)
        for piece in range(pieces):
            if piece == pieces - 1 and not case.counted:
                buffers.gradients.arm()
            first = mesh.coordinate("dp") * per_rank + piece * (per_rank // pieces)
            losses = [loss_of(layers, step, first + i, dtype) for i in range(per_rank // pieces)]
            torch.stack(losses).sum().backward()
        buffers.gradients.start_reduce()
        buffers.gradients.start_tied_reduce()
        buffers.gradients.finish_reduce()
        norms.append(float(optimizer.grad_norm()))
        optimizer.step(lr=LR, weight_decay=DECAY)
    buffers.weights.unshard()
    weights = {name: p.detach().clone() for name, p in named(layers)}
    return norms, weights


def body_equality(world: World, cases: list[Case]) -> list[tuple[float, float]]:
    """For each case the largest relative error of a norm and the largest error of a weight."""
    errors = []
    for case in cases:
        norms, weights = train(world, case)
        want_norms, want = reference(case.optimizer)
        errors.append(
            (
                max(abs(a - b) / b for a, b in zip(norms, want_norms, strict=True)),
                max(float((weights[name] - want[name]).abs().max()) for name in want),
            )
        )
    return errors


def cases_of(stage: int) -> list[Case]:
    plain = Case(stage)
    return [
        plain,
        replace(plain, overlap=False),
        replace(plain, bucket_size=700),
        replace(plain, bucket_size=700, counted=False),
        replace(plain, bucket_size=100, overlap=False, optimizer="sgd"),
    ]


@pytest.mark.in_turn
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_stage_equals_plain_torch(stage: int, size: int) -> None:
    cases = cases_of(stage)
    for errors in run_ranks(body_equality, size, cases) if size > 1 else [run_single(body_equality, cases)]:
        for case, (norm, weight) in zip(cases, errors, strict=True):
            assert norm < 1e-12 and weight < 1e-12, case


@pytest.mark.parametrize("stage", [s if s in (1, 3) else pytest.param(s, marks=pytest.mark.landing) for s in range(4)])
def test_hybrid_sharding_equals_plain_torch(stage: int) -> None:
    for errors in run_ranks(body_equality, 4, [Case(stage, replicate=2), Case(stage, replicate=2, overlap=False)]):
        assert all(norm < 1e-12 and weight < 1e-12 for norm, weight in errors)


def body_weights(world: World, cases: list[Case], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    return [train(world, case, dtype)[1] for case in cases]


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.landing), torch.bfloat16]
)
def test_sharding_changes_no_bit_at_two_ranks(dtype: torch.dtype) -> None:
    """One sum of two numbers per element whatever the stage; stages 2 and 3 with one micro-batch (rulings 9)."""
    cases = [Case(0), Case(1), Case(1, bucket_size=300)]
    cases += [Case(stage, microbatches=1, bucket_size=300) for stage in (0, 2, 3)]
    first, *others = run_ranks(body_weights, 2, cases, dtype)
    for weights in others:
        for mine, theirs in zip(first, weights, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    for base, same in ((0, 1), (0, 2), (3, 4), (3, 5)):
        for name in first[base]:
            assert torch.equal(first[base][name], first[same][name]), (cases[same], name)
