"""Attention by tiles: a block of queries against the keys that some query of it sees, and against no others.

What nobody sees is never touched, forward and backward; only the edges of what is seen are masked, tile by tile:

    keys      0         w         2w                documents                 a window
    queries  [#.........]                           [#.......]                [#.......]
             [##........]                           [##......]                [##......]
             [###.......]                           [..#.....]                [.##.....]
             [####......]                           [..##....]                [..##....]

Nothing of size s x s is kept: backward computes a tile's weights again from the logarithm of each query's sum (`lse`;
FlashAttention, arXiv 2205.14135). With the final lse, and delta = rowsum(dO * O), tiles are independent of each other,
so the keys may come in parts, in any order and from other ranks; partial results are merged by their lse::

    l = logaddexp(l, lb)     o = o exp(l_old - l) + ob exp(lb - l)      P = exp(S - l)     dS = P * (dO V^T - delta)

Heads come first here: queries `[n, s * r, d]`, the r heads of a token beside each other; keys, values `[n, k, d]`, n =
b * g. Dropout drops elements of P after the sum, keyed by positions, so its backward drops the same elements again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalite.nn.dropout import keyed_dropout
from megalite.visibility import Visibility

# Tokens of a block of queries; keys that it is multiplied with at a time.
QUERY_TILE, KEY_SPAN = 64, 4096


@dataclass(frozen=True)
class WeightDropout:
    """Keyed dropout of attention weights. words: of (sample, head, query), `[n, s * r]`."""

    p: float
    words: Tensor

    def __call__(self, weights: Tensor, heads: slice, rows: slice, keys: Tensor) -> Tensor:
        """weights `[n, rows, cols]` of keys at these positions."""
        return keyed_dropout(weights, self.p, self.words[heads, rows], keys)


class Tile(NamedTuple):
    """heads, rows: of the queries `[n, s * r]`. keys: of those that some of its queries see. alone: no other tile has
    these rows, and each of them sees something here. edges: (columns, hidden `[rows / r, 1, cols]`) where some do not.
    """

    heads: slice
    rows: slice
    keys: slice
    alone: bool
    edges: list[tuple[slice, Tensor]]


def tiles(sight: Visibility, groups: int, r: int) -> Iterator[Tile]:
    """The tiles that somebody sees. groups: key heads of a sample where samples differ, all of them where not."""
    queries, keys = _runs(sight.queries.tolist()), _runs(sight.keys.tolist())
    samples = 1 if sight.first is None else len(sight.first)
    for sample in range(samples):
        heads = slice(sample * groups, (sample + 1) * groups) if samples > 1 else slice(None)
        first = None if sight.first is None else sight.first[sample]
        bounds = None if first is None else first.tolist()
        for begin, end, position in queries:
            for low in range(begin, end, QUERY_TILE):
                high = min(low + QUERY_TILE, end)
                at = position + low - begin
                lowest = 0 if bounds is None else min(bounds[low:high])
                seen = list(_seen(keys, lowest, at + high - low))
                clear = 0 if bounds is None else max(bounds[low:high])  # from here on nothing is too early
                for columns, there in seen:
                    alone = (
                        len(seen) == 1 and there <= lowest and there + columns.stop - columns.start == at + high - low
                    )
                    edges = list(_edges(sight, first, slice(low, high), columns, there, clear, at))
                    yield Tile(heads, slice(low * r, high * r), columns, alone, edges)


def _runs(positions: list[int]) -> list[tuple[int, int, int]]:
    """Consecutive positions as (begin, end, position of the first)."""
    cuts = [i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1]
    return [(a, b, positions[a]) for a, b in zip([0, *cuts], [*cuts, len(positions)], strict=True)]


def _seen(keys: list[tuple[int, int, int]], low: int, high: int) -> Iterator[tuple[slice, int]]:
    """(columns, position of the first) of the keys at positions `low .. high`, at most `KEY_SPAN` at a time."""
    for begin, end, position in keys:
        first, last = begin + max(0, low - position), min(end, begin + high - position)
        for start in range(first, last, KEY_SPAN):
            yield slice(start, min(start + KEY_SPAN, last)), position + start - begin


def _edges(
    sight: Visibility, first: Tensor | None, rows: slice, columns: slice, there: int, clear: int, at: int
) -> Iterator[tuple[slice, Tensor]]:
    """What is hidden from some rows: columns before `clear`, and those behind the first row's own, which is `at`."""
    width = columns.stop - columns.start
    left, right = min(width, max(0, clear - there)), max(0, min(width, at + 1 - there))
    spans = [slice(0, left), slice(right, width)] if left < right else [slice(0, width)]
    for span in spans:
        if span.stop > span.start:
            keys = sight.keys[columns][span]
            hidden = keys > sight.queries[rows, None]
            if first is not None:
                hidden = hidden | (keys < first[rows, None])
            yield span, hidden[:, None]


def _scores(q: Tensor, k: Tensor, tile: Tile, r: int, dtype: torch.dtype) -> Tensor:
    """`[n, rows, cols]`, -inf where hidden. q is scaled."""
    scores = torch.bmm(q[tile.heads, tile.rows], k[tile.heads, tile.keys].transpose(1, 2)).to(dtype)
    by_token = scores.unflatten(1, (-1, r))
    for columns, hidden in tile.edges:
        by_token[..., columns].masked_fill_(hidden, float("-inf"))
    return scores


def attend_tiles(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Visibility,
    groups: int,
    drop: WeightDropout | None,
) -> None:
    """Merges what the queries see of these keys into `out` `[n, s * r, d]` and `lse` `[n, s * r]` (in the beginning 0
    and -inf), both in fp32 or wider. q is scaled by d ** -0.5.
    """
    r = q.shape[1] // len(sight.queries)
    for tile in tiles(sight, groups, r):
        heads, rows, keys = tile[:3]
        weights = _scores(q, k, tile, r, lse.dtype)
        lowest = torch.finfo(weights.dtype).min  # a row that sees nothing here gives no NaN
        most = weights.amax(-1).clamp_(min=lowest)
        weights.sub_(most[..., None]).exp_()
        here = weights.sum(-1).log_().add_(most)
        if drop is not None:
            weights = drop(weights, heads, rows, sight.keys[keys])
        there, sums = out[heads, rows], lse[heads, rows]
        new = here if tile.alone else torch.logaddexp(sums, here)
        scale = (most - new.clamp(min=lowest)).exp_()[..., None]
        part = torch.bmm(weights.to(v.dtype), v[heads, keys])
        if tile.alone:
            torch.mul(part, scale, out=there)
        else:
            there.mul_((sums - new.clamp(min=lowest)).exp_()[..., None]).addcmul_(part.to(scale.dtype), scale)
        sums.copy_(new)


def attend_tiles_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    dy_heads: Tensor,
    delta: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Visibility,
    groups: int,
    drop: WeightDropout | None,
) -> None:
    """Adds to the gradients of q (as scaled), k and v, all in fp32 or wider. lse: the final one. delta: rowsum(dO *
    out), `[n, s * r]`.
    """
    dq, dk, dv = grads
    r = q.shape[1] // len(sight.queries)
    for tile in tiles(sight, groups, r):
        heads, rows, keys = tile[:3]
        weights = _scores(q, k, tile, r, lse.dtype).sub_(lse[heads, rows, None]).exp_()
        dweights = torch.bmm(dy_heads[heads, rows], v[heads, keys].transpose(1, 2)).to(lse.dtype)
        kept = weights
        if drop is not None:
            dweights, kept = (drop(x, heads, rows, sight.keys[keys]) for x in (dweights, weights))
        _add(dv[heads, keys], kept.to(v.dtype).transpose(1, 2), dy_heads[heads, rows])
        dscores = dweights.sub_(delta[heads, rows, None]).mul_(weights).to(q.dtype)
        _add(dq[heads, rows], dscores, k[heads, keys])
        _add(dk[heads, keys], dscores.transpose(1, 2), q[heads, rows])


def _add(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target += a @ b."""
    if target.dtype == a.dtype:
        target.baddbmm_(a, b)
    else:
        target.add_(torch.bmm(a, b))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's has no type
def tiled_attention(q: Tensor, k: Tensor, v: Tensor, sight: Visibility, drop: WeightDropout | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of what is seen: `[s, b, g, r, d]`, `[k, b, g, d]` -> `[s, b, g * r * d]`."""
    return _TiledAttention.apply(q, k, v, sight, drop)


class _TiledAttention(Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch's own has no type

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sight: Visibility, drop: WeightDropout | None) -> Tensor:
        out, lse = empty_result(q)
        attend_tiles(out, lse, *heads_first(q, k, v), sight, q.shape[2], drop)
        y = tokens_first(out, q).to(q.dtype)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.sight, ctx.drop = sight, drop
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse = ctx.saved_tensors
        operands = heads_first(q, k, v)
        dy_heads, delta = gradient_of_result(dy, y, q, lse.dtype)
        dq, dk, dv = grads = no_gradients(operands, lse.dtype)
        attend_tiles_backward(grads, dy_heads, delta, lse, *operands, ctx.sight, q.shape[2], ctx.drop)
        dq = tokens_first(dq.mul_(q.shape[-1] ** -0.5), q).view_as(q)
        return dq.to(q.dtype), keys_back(dk, k), keys_back(dv, v), None, None


def empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) that nothing has been merged into, for queries `[s, b, g, r, d]`."""
    s, b, g, r, d = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(b * g, s * r, d, dtype=wide, device=q.device)
    return out, torch.full((b * g, s * r), float("-inf"), dtype=wide, device=q.device)


def no_gradients(operands: Sequence[Tensor], wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What `attend_tiles_backward` adds to, for operands as `heads_first` gives them."""
    dq, dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in operands)
    return dq, dk, dv


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q scaled, `[b * g, s * r, d]`; k, v `[b * g, k, d]`)."""
    s, b, g, r, d = q.shape
    scaled = (q * d**-0.5).permute(1, 2, 0, 3, 4).reshape(b * g, s * r, d)
    return scaled, *(x.permute(1, 2, 0, 3).reshape(b * g, -1, d) for x in (k, v))


def tokens_first(x: Tensor, q: Tensor) -> Tensor:
    """`[b * g, s * r, d]` -> `[s, b, g * r * d]`, as the queries q are."""
    s, b, g, r, d = q.shape
    return x.view(b, g, s, r, d).permute(2, 0, 1, 3, 4).reshape(s, b, g * r * d)


def keys_back(x: Tensor, k: Tensor) -> Tensor:
    """`[b * g, k, d]` -> `[k, b, g, d]`, in the dtype of k."""
    length, b, g, d = k.shape
    return x.view(b, g, length, d).permute(2, 0, 1, 3).to(k.dtype)


def gradient_of_result(dy: Tensor, y: Tensor, q: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """(dy_heads `[b * g, s * r, d]`, delta `[b * g, s * r]`) of the gradient dy of y `[s, b, g * r * d]`."""
    s, b, g, r, d = q.shape
    dy_heads = dy.reshape(s, b, g, r, d).permute(1, 2, 0, 3, 4).reshape(b * g, s * r, d)
    delta = (dy.to(wide) * y.to(wide)).reshape(s, b, g, r, d).sum(-1)
    return dy_heads, delta.permute(1, 2, 0, 3).reshape(b * g, s * r)
