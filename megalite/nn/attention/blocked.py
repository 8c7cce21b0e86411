"""Causal attention for CPUs and sequences of up to about a thousand tokens: matrix products over blocks of queries.

A block of queries is multiplied with the keys up to its own end only, so half of the square is never touched, and
each block's scores stay in the cache between the products and the softmax. Queries, keys and values are read where
the projection left them and their gradients are written where its backward wants them: nothing is split, copied or
put together.

    queries 0 .. B      x keys 0 .. B         [#.......]
    queries B .. 2B     x keys 0 .. 2B        [###.....]      B tokens a block; only the last B columns need the mask
    ...                                       [#####...]

The softmax's weights are kept for backward, half of s x s for each head.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from megalite.gradient import Node
from megalite.inventory import block_area, query_blocks

OPERATOR = "megalite::blocked_attention"


def blocked_attention(qkv: Tensor, values: int | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, causal: `[s, b, g, r + 2, d]` (r query heads, a key, a value) -> `[s, b, g * r * d]`,
    or of the first `values` channels of v alone `[s, b, g * r * values]`. Under `torch.compile` an operator
    (`register_operator` first): what its compiler makes of it is slower.
    """
    if torch.compiler.is_compiling():
        y: Tensor = torch.ops.megalite.blocked_attention(qkv, values)[0]
        return y
    return _BlockedAttention.apply(qkv, values)


@functools.cache
def register_operator() -> None:
    """Makes the operator known to torch, for compiled blocks."""
    forward = torch.library.custom_op(
        OPERATOR, attend, mutates_args=(), schema="(Tensor qkv, int? values=None) -> (Tensor, Tensor)"
    )
    backward = torch.library.custom_op(
        f"{OPERATOR}_backward",
        attend_backward,
        mutates_args=(),
        schema="(Tensor dy, Tensor qkv, Tensor y, Tensor weights) -> Tensor",
    )

    def shapes(qkv: Tensor, values: int | None = None) -> tuple[Tensor, Tensor]:
        s, b, g, parts, d = qkv.shape
        return qkv.new_empty(s, b, g * (parts - 2) * (values or d)), qkv.new_empty(b * g * (parts - 2) * block_area(s))

    def keep(ctx: Any, inputs: tuple[Tensor, int | None], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], *output)

    forward.register_fake(shapes)
    backward.register_fake(lambda dy, qkv, y, weights: qkv.new_empty(qkv.shape))
    forward.register_autograd(lambda ctx, dy, _: (backward(dy, *ctx.saved_tensors), None), setup_context=keep)


class _BlockedAttention(Node):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, values: int | None) -> Tensor:
        y, weights = attend(qkv, values)
        ctx.save_for_backward(qkv, y, weights)  # the layer behind keeps y too
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return attend_backward(dy, *ctx.saved_tensors), None


def attend(qkv: Tensor, values: int | None = None) -> tuple[Tensor, Tensor]:
    """(What `blocked_attention` returns; the weights of all blocks, one block after the other.)"""
    s, b, g, parts, d = qkv.shape
    q, k, v = _heads(qkv)
    r, v = parts - 2, v[..., :values]
    context = torch.empty_like(q[..., :values])
    weights = qkv.new_empty(b * g * r * block_area(s))
    for (begin, end), scores in zip(query_blocks(s), _by_block(weights, s, b * g, r), strict=True):
        rows = slice(begin * r, end * r)
        torch.bmm(q[:, rows] * d**-0.5, k[:, :end].transpose(1, 2), out=scores)
        hidden = scores.new_full((end - begin, end - begin), -torch.inf).triu_(1)
        scores[:, :, begin:].add_(hidden if r == 1 else hidden.repeat_interleave(r, 0))
        torch.softmax(scores, -1, out=scores)
        torch.bmm(scores, v[:, :end], out=context[:, rows])
    # contiguous: as the operator announces it, also where one group makes the reshape a view
    return _to_tokens(context, s, r).reshape(s, b, -1).contiguous(), weights


def attend_backward(dy: Tensor, qkv: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """The gradient of `qkv`, from that of `y` and what `attend` returned."""
    s, b, g, parts, d = qkv.shape
    r = parts - 2
    scale = d**-0.5
    values = y.shape[-1] // (g * r)
    q, k, v = _heads(qkv)
    v = v[..., :values]
    dcontext = _by_head(dy.reshape(s, b * g, r, values))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    inner = _by_head((dy * y).reshape(s, b * g, r, values).sum(-1, keepdim=True))
    blocks = zip(query_blocks(s), _by_block(weights, s, b * g, r), strict=True)
    # from the last block, which sees all keys, to the first: the sums over queries begin with a plain product
    for (begin, end), part in reversed(list(blocks)):
        rows = slice(begin * r, end * r)
        sums = 0 if end == s else 1
        torch.baddbmm(dv[:, :end], part.transpose(1, 2), dcontext[:, rows], beta=sums, out=dv[:, :end])
        dscores = torch.bmm(dcontext[:, rows], v[:, :end].transpose(1, 2))
        dscores.sub_(inner[:, rows]).mul_(part)
        torch.baddbmm(dq[:, rows], dscores, k[:, :end], beta=0, alpha=scale, out=dq[:, rows])
        torch.baddbmm(dk[:, :end], dscores.transpose(1, 2), q[:, rows], beta=sums, alpha=scale, out=dk[:, :end])
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    whole = dqkv.view(s, b * g, parts, d)
    whole[:, :, :r] = _to_tokens(dq, s, r)
    whole[:, :, r] = dk.transpose(0, 1)
    whole[:, :, r + 1, :values] = dv.transpose(0, 1)
    whole[:, :, r + 1, values:] = 0
    return dqkv


def _by_block(weights: Tensor, s: int, heads: int, r: int) -> list[Tensor]:
    """Each block's `[heads, rows * r, keys]`."""
    shapes = [(heads, (end - begin) * r, end) for begin, end in query_blocks(s)]
    parts = weights.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q `[b * g, s * r, d]`; k, v `[b * g, s, d]`: views (q a copy where r > 1)."""
    s, b, g, parts, d = qkv.shape
    packed = qkv.reshape(s, b * g, parts, d)
    return _by_head(packed[:, :, : parts - 2]), packed[:, :, -2].transpose(0, 1), packed[:, :, -1].transpose(0, 1)


def _by_head(x: Tensor) -> Tensor:
    """`[s, n, r, d]` -> `[n, s * r, d]`, the r heads of a token beside each other."""
    s, n, r, d = x.shape
    return x[:, :, 0].transpose(0, 1) if r == 1 else x.permute(1, 0, 2, 3).reshape(n, s * r, d)


def _to_tokens(x: Tensor, s: int, r: int) -> Tensor:
    """`[n, s * r, d]` -> `[s, n, r, d]` (a view)."""
    return x.view(x.shape[0], s, r, x.shape[2]).permute(1, 0, 2, 3)
