"""The gate of gpt-oss (arXiv 2508.10925): x sigmoid(1.702 x) for GELU, both halves bounded, a number added to one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Elementwise = Callable[[Tensor], Tensor]
Gradient = Callable[[Tensor, Tensor], Tensor]
QUICK = 1.702


def quick_geglu(x: Tensor) -> Tensor:
    """quick_gelu(gate) * value, with x sigmoid(1.702 x) for GELU."""
    gate, value = x.chunk(2, -1)
    return gate * torch.sigmoid(QUICK * gate) * value


def quick_geglu_gradient(x: Tensor, dy: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    opened = torch.sigmoid(QUICK * gate)
    slope = opened * (1 + QUICK * gate * (1 - opened))
    return torch.cat([dy * value * slope, dy * gate * opened], -1)


def clamped(plain: Elementwise, gradient: Gradient, offset: float, most: float | None) -> tuple[Elementwise, Gradient]:
    """(A gated activation, its gradient) with the gate at most `most`, the value between it and its negative, and
    `offset` added to the value."""
    bound = torch.inf if most is None else most

    def shifted(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return torch.cat([gate.clamp(max=bound), value.clamp(-bound, bound) + offset], -1)

    def shifted_gradient(x: Tensor, dy: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        within = torch.cat([gate <= bound, value.abs() <= bound], -1)
        return gradient(shifted(x), dy) * within

    return lambda x: plain(shifted(x)), shifted_gradient
