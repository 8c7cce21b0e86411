"""LayerNorm and RMSNorm of tokens whose features several ranks share: two numbers a token are sent each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.comm import Axis, all_gather, all_reduce_
from megalite.gradient import Node, widened


def grid_norm(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, epsilon: float) -> Tensor:
    """Normalises `[..., h]` of which each rank has `[..., n]`; `[n]` weights, without a bias by the root of the mean
    square. In the wider of fp32 and x's dtype; the result has the weight's."""
    return _Norm.apply(x, weight, bias, axis, epsilon)


class _Norm(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, epsilon: float) -> Tensor:
        wide = widened(x)
        ctx.axis, ctx.total = axis, axis.size * x.shape[-1]
        if bias is None:
            mean, squares = None, wide.square().sum(-1, keepdim=True)
            all_reduce_(squares, axis)
        else:
            own = wide.mean(-1, keepdim=True)
            parts = all_gather(torch.stack((own, (wide - own).square().sum(-1, keepdim=True)))[None], axis)
            mean = parts[:, 0].mean(0)
            squares = (parts[:, 1] + x.shape[-1] * (parts[:, 0] - mean).square()).sum(0)
        scale = torch.rsqrt(squares / ctx.total + epsilon)
        ctx.save_for_backward(x, weight, mean, scale)
        y = (wide if mean is None else wide - mean) * scale * widened(weight)
        return (y if bias is None else y + widened(bias)).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        dy, wide = widened(dy), widened(x)
        normal = (wide if mean is None else wide - mean) * scale
        slope = dy * widened(weight)
        addends = (slope * normal, slope) if mean is not None else (slope * normal,)
        sums = torch.stack([each.sum(-1, keepdim=True) for each in addends])
        all_reduce_(sums, ctx.axis)
        sums /= ctx.total
        dx = slope - normal * sums[0]
        if mean is not None:
            dx -= sums[1]
        dweight, dbias = (each.flatten(0, -2).sum(0).to(weight.dtype) for each in (dy * normal, dy))
        return (dx * scale).to(x.dtype), dweight, None if mean is None else dbias, None, None
