"""Long sums in the number formats of training, against fp64: the error must not grow with length."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from devices import DEVICES
from torch import Tensor

from megalite.comm import Axis
from megalite.gradient import WeightGradQueue, sum_of_squares
from megalite.optim.muon import orthogonalise
from megalite.parallel.tensor.cross_entropy import VocabShard, fused_cross_entropy
from megalite.train.trainer import Trainer

# Constant numbers make every rounding of a partial sum the same one: nothing averages out.
NUMBERS: dict[str, Callable[[int], Tensor]] = {
    "normal": lambda n: torch.randn(n) * 1e-3,
    "alike": lambda n: torch.full((n,), 0.00123457),
    "thirds": lambda n: torch.full((n,), 1 / 3),
    "of many sizes": lambda n: torch.randn(n).mul(3).exp(),
    "one large": lambda n: torch.cat([torch.full((1,), 30.0), torch.full((n - 1,), 1e-2)]),
    "mostly zero": lambda n: torch.randn(n) * (torch.rand(n) < 0.01),
    "large": lambda n: torch.randn(n) * 1e12,
    "tiny": lambda n: torch.randn(n) * 1e-12,
}


def exact(x: Tensor) -> float:
    return float(sum(part.double().square().sum() for part in x.view(-1).split(1 << 20)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", NUMBERS)
def test_squares_of_millions_of_numbers(kind: str, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = NUMBERS[kind](10_000_019 if kind in ("normal", "alike") else 1_000_003).to(device, dtype)
    assert float(sum_of_squares([x])) == pytest.approx(exact(x), rel=1e-6)


def test_squares_at_the_ends_of_rows() -> None:
    torch.manual_seed(0)
    for number in (1, 2, 255, 256, 257, 511, 512, 513, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 256 << 11):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            x = torch.randn(number).to(dtype)
            assert float(sum_of_squares([x])) == pytest.approx(exact(x), rel=1e-6), (number, dtype)
    parts = [torch.randn(3, 5), torch.empty(0), torch.randn(1000).bfloat16(), torch.randn(7).double()]
    assert float(sum_of_squares(parts)) == pytest.approx(sum(map(exact, parts)), rel=1e-6)
    assert float(sum_of_squares([])) == float(sum_of_squares([torch.empty(0)])) == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 255, 1000, -1])
def test_what_is_not_finite_stays_so(bad: float, at: int) -> None:
    x = torch.ones(70_001)
    x[at] = bad
    assert not sum_of_squares([x]).isfinite()


@pytest.mark.parametrize("device", DEVICES)
def test_muon_begins_with_the_norm_of_a_large_matrix(device: str) -> None:
    """Without an iteration what is left is the matrix over its norm."""
    torch.manual_seed(0)
    for x in (torch.full((2, 3000, 1500), 0.0123457), torch.randn(1500, 3000)):
        found = orthogonalise(x.to(device), steps=0).double().square().sum((-2, -1)).sqrt()
        tolerance = 1e-6 if device == "cpu" else 3 * 2**-9  # in bf16 there: the matrix, its norm, and what divides them
        torch.testing.assert_close(found.cpu(), torch.ones_like(found.cpu()), rtol=0, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gradient", [False, True])
def test_the_loss_of_many_tokens(gradient: bool, device: str) -> None:
    """All alike, as at the start of a training: log 8 each, some of them masked."""
    tokens = 300_000
    x, weight = torch.zeros(tokens, 2, device=device), torch.ones(8, 2, device=device, requires_grad=gradient)
    labels, mask = torch.zeros(tokens, dtype=torch.int64, device=device), torch.ones(tokens, device=device)
    mask[::7] = 0.0
    shard = VocabShard(Axis.single("tp"), 0, 8)
    given = {"shard": shard, "sequence_parallel": False, "queue": WeightGradQueue()}
    with torch.set_grad_enabled(gradient):
        total = fused_cross_entropy(x, weight, labels, mask, **given)
    assert float(total) == pytest.approx(float(mask.double().sum()) * math.log(8.0), rel=3e-7)


def test_the_loss_of_many_micro_batches() -> None:
    """The mean of 4,096 equal losses is that loss, in fp32 too."""
    share = torch.tensor(1 / 4096)
    reader = SimpleNamespace(share_of_loss=lambda number: (7, share), part_names=(), more=0)
    trainer = SimpleNamespace(_losses={}, batch_reader=reader)
    Trainer._add_losses(trainer, {number: torch.tensor(10.8257) for number in range(4096)})
    assert float(trainer._losses[7]) == pytest.approx(float(torch.tensor(10.8257)), rel=1e-12)
