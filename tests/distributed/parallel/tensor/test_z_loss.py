"""z-loss and the soft cap of logits against the formulas, by torch's autograd: both implementations, one rank and
several, some without tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.comm import ParallelMesh
from megalite.comm.world import World
from megalite.gradient import WeightGradQueue
from megalite.parallel.tensor import LossKernels, VocabShard, fused_cross_entropy, loss_kernels
from megalite.testing import run_ranks

N, H, VOCAB, PADDED, COEFFICIENT = 20, 16, 37, 64, 0.3


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, H, generator=generator, dtype=torch.float64) for n in (N, PADDED))
    labels = torch.randint(0, VOCAB, (N,), generator=generator)
    return x, weight, labels, torch.rand(N, generator=generator).double()


def body(world: World, fused: bool, coefficient: float, softcap: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    axis = ParallelMesh.build(rank=world.rank, size=world.size, tp=world.size)["tp"]
    x, weight, labels, mask = tensors()
    rows = PADDED // world.size
    own = weight[world.rank * rows :][:rows].clone().requires_grad_()
    x.requires_grad_()
    kernels = LossKernels(loss_kernels.statistics, loss_kernels.gradient) if fused else None
    valid = max(0, min(rows, VOCAB - world.rank * rows))
    shard = VocabShard(axis, world.rank * rows, valid, kernels, coefficient, softcap)
    loss = fused_cross_entropy(x, own, labels, mask, shard=shard, sequence_parallel=False, queue=WeightGradQueue())
    loss.backward()
    assert x.grad is not None and own.grad is not None
    return loss.detach(), x.grad, own.grad


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_the_gradient_is_that_of_the_formula_and_the_loss_is_without_it(
    world: int, softcap: float, fused: bool
) -> None:
    x, weight, labels, mask = (t.requires_grad_() if i < 2 else t for i, t in enumerate(tensors()))
    logits = x @ weight[:VOCAB].t()
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    entropy = (F.cross_entropy(logits, labels, reduction="none") * mask).sum()
    (entropy + COEFFICIENT * (logits.logsumexp(-1).square() * mask).sum()).backward()
    results = run_ranks(body, world, fused, COEFFICIENT, softcap)
    assert x.grad is not None and weight.grad is not None
    for loss, dx, _ in results:
        torch.testing.assert_close(loss, entropy.detach(), rtol=1e-13, atol=0)
        torch.testing.assert_close(dx, x.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([each[2] for each in results]), weight.grad, rtol=1e-12, atol=1e-12)


def test_without_it_nothing_changes() -> None:
    plain, off = (run_ranks(body, 1, False, coefficient)[0] for coefficient in (0.0, 1e-300))
    assert all(torch.equal(one, other) for one, other in zip(plain, off, strict=True))
