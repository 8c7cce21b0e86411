"""Tokens traded for heads (Ulysses, arXiv 2309.14509): of s/A tokens and all groups to all s tokens and g/A groups."""

from __future__ import annotations

from torch import Tensor

from megalite.comm import Axis, all_to_all, conjugates


def trade_tokens_for_heads(x: Tensor, axis: Axis) -> Tensor:
    """`[s/A, b, g, ...]` -> `[s, b, g/A, ...]`: the groups in the order of the ranks."""
    return x if axis.size == 1 else conjugates(x, axis, _to_heads, _to_tokens)


def trade_heads_for_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Undoes `trade_tokens_for_heads`: `[s, b, g/A, ...]` -> `[s/A, b, g, ...]`."""
    return x if axis.size == 1 else conjugates(x, axis, _to_tokens, _to_heads)


def _to_heads(x: Tensor, axis: Axis) -> Tensor:
    parts = x.unflatten(2, (axis.size, -1)).movedim(2, 0).contiguous()  # [A, s/A, b, g/A, ...]
    return all_to_all(parts, axis).flatten(0, 1)


def _to_tokens(x: Tensor, axis: Axis) -> Tensor:
    parts = all_to_all(x.unflatten(0, (axis.size, -1)).contiguous(), axis)  # [A, s/A, b, g/A, ...]
    return parts.movedim(0, 2).flatten(2, 3)
