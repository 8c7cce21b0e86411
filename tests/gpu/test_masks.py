"""Attention of every kind of mask, with its gradients, is the formula in fp64; dropped weights are those of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.devices import DEVICES
from torch import Tensor

from benchmarks import masks
from megalite.comm import ContextAxes

LENGTH, DOCUMENT, WINDOW, CAP = 512, 100, 60, 3.0  # of another length, window and cap than the trial of a kernel


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LENGTH", "DOCUMENT", "WINDOW", "CAP"):
        monkeypatch.setattr(masks, name, globals()[name])
    monkeypatch.setattr(masks, "GROUPS", 2)


def found(kind: str, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Queries, keys, values and sinks; the result and their gradients, in bf16."""
    torch.manual_seed(0)
    run, leaves = masks.attention(kind, device, ContextAxes())
    y = run()
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return leaves, [y, *torch.autograd.grad(y, leaves, dy)]


def by_formula(kind: str, leaves: list[Tensor]) -> list[Tensor]:
    """Softmax of all scores, hidden ones at minus infinity, sinks as a further column."""
    doubles = [x.detach().cpu().double().requires_grad_() for x in leaves]
    q, k, v, words = *doubles[:3], kind
    scores = torch.einsum("sbgrd,kbgd->bgrsk", q, k) * q.shape[-1] ** -0.5
    scores = CAP * torch.tanh(scores / CAP) if "cap" in words else scores
    at = torch.arange(LENGTH)
    seen = at[:, None] >= at
    seen &= at[:, None] - at < WINDOW if "window" in words else True
    seen &= at[:, None] // DOCUMENT == at // DOCUMENT if "documents" in words else True
    scores = scores.masked_fill(~seen, float("-inf"))
    if "sinks" in words:
        sink = doubles[3].view(1, *q.shape[2:4], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), -1)
    weights = torch.softmax(scores, -1)[..., :LENGTH]
    y = torch.einsum("bgrsk,kbgd->sbgrd", weights, v).flatten(2)
    dy: Any = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y, *torch.autograd.grad(y, doubles, dy.bfloat16().double())]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", masks.KINDS)
def test_every_kind_is_the_formula(kind: str, device: str) -> None:
    if "all" in kind or "dropout" in kind:
        if device == "cpu":
            pytest.skip("what others are compared with")
        expected = found(kind, "cpu")[1]
        ours = found(kind, device)[1]
    else:
        leaves, ours = found(kind, device)
        expected = by_formula(masks.KINDS[kind], leaves)
    for mine, its in zip(ours, expected, strict=True):
        worst = (mine.cpu().double() - its.double()).abs().max() / its.abs().max()
        assert worst < 0.02, f"{kind}: {worst:.3f} of the largest value apart"
