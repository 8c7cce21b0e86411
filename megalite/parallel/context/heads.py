"""Tokens traded for heads (Ulysses, arXiv 2309.14509): of s/A tokens and all groups to all s tokens and g/A groups."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megalite.comm import Axis, all_to_all
from megalite.gradient import Node


def trade_tokens_for_heads(x: Tensor, axis: Axis) -> Tensor:
    """`[s/A, b, g, ...]` -> `[s, b, g/A, ...]`: the groups in the order of the ranks."""
    return x if axis.size == 1 else _Trade.apply(x, axis, True)


def trade_heads_for_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Undoes `trade_tokens_for_heads`: `[s, b, g/A, ...]` -> `[s/A, b, g, ...]`."""
    return x if axis.size == 1 else _Trade.apply(x, axis, False)


class _Trade(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, to_heads: bool) -> Tensor:
        ctx.axis, ctx.to_heads = axis, to_heads
        return _to_heads(x, axis) if to_heads else _to_tokens(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return (_to_tokens if ctx.to_heads else _to_heads)(dy, ctx.axis), None, None


def _to_heads(x: Tensor, axis: Axis) -> Tensor:
    parts = x.unflatten(2, (axis.size, -1)).movedim(2, 0).contiguous()  # [A, s/A, b, g/A, ...]
    return all_to_all(parts, axis).flatten(0, 1)


def _to_tokens(x: Tensor, axis: Axis) -> Tensor:
    parts = all_to_all(x.unflatten(0, (axis.size, -1)).contiguous(), axis)  # [A, s/A, b, g/A, ...]
    return parts.movedim(0, 2).flatten(2, 3)
