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

A cap bounds the scores, c tanh(S / c) (Gemma 2, arXiv 2408.00118); its slope 1 - tanh^2 multiplies dS. A sink is one
more logit in a head's softmax, which takes weight and has no value: it enters lse after the last tile
(`parallel.context.ring`), so that the formulas above hold as they are.

Heads come first here: queries `[n, s * r, d]`, the r heads of a token beside each other; keys, values `[n, k, d]`, n =
b * g. Dropout drops elements of P after the sum, keyed by positions, so its backward drops the same elements again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.comm import Axis
from megalite.nn.dropout import keyed_dropout
from megalite.nn.uncompiled import Uncompiled
from megalite.parallel.context import Operands, ring_attention
from megalite.visibility import Visibility

# Tokens of a block of queries, and at most on a device, whose host launches each operation of a tile; keys that it is
# multiplied with at a time; scores of a tile on a device, each of which dropout gives words of eight bytes.
QUERY_TILE, LARGEST_TILE, KEY_SPAN, TILE_SCORES = 64, 1024, 4096, 1 << 25


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


def query_tile(q: Tensor, queries: int, keys: int) -> int:
    """Tokens of a block of queries, of `queries` tokens `[n, s * r, d]` and so many keys."""
    if q.device.type == "cpu":
        return QUERY_TILE  # what a tile is made of stays in a cache
    scores, tile = q.shape[0] * (q.shape[1] // queries) * min(keys, KEY_SPAN), QUERY_TILE
    while 2 * tile <= LARGEST_TILE and 2 * tile * scores <= TILE_SCORES:
        tile *= 2
    return tile


def tiles(sight: Visibility, groups: int, r: int, rows: int | None = None) -> Iterator[Tile]:
    """The tiles that somebody sees. groups: key heads of a sample where samples differ, all of them where not. rows:
    tokens of a block of queries."""
    size = QUERY_TILE if rows is None else rows
    if sight.at is None:
        queries, keys = runs(sight.queries), runs(sight.keys)
    else:
        queries, keys = [(0, len(sight.queries), sight.at)], [(0, len(sight.keys), 0)]
    samples = 1 if sight.first is None else len(sight.first)
    for sample in range(samples):
        heads = slice(sample * groups, (sample + 1) * groups) if samples > 1 else slice(None)
        first = None if sight.first is None else sight.first[sample]
        bounds = None if first is None else _bounds(sight, first)
        for begin, end, position in queries:
            for low in range(begin, end, size):
                high = min(low + size, end)
                at = position + low - begin
                lowest = 0 if bounds is None else min(bounds[low:high])
                seen = list(_seen(keys, lowest, at + high - low))
                clear = 0 if bounds is None else max(bounds[low:high])  # from here on nothing is too early
                for columns, first_key in seen:
                    behind_last = first_key + columns.stop - columns.start
                    alone = len(seen) == 1 and first_key <= lowest and behind_last == at + high - low
                    edges = list(_edges(sight, first, slice(low, high), columns, first_key, clear, at))
                    yield Tile(heads, slice(low * r, high * r), columns, alone, edges)


def _bounds(sight: Visibility, first: Tensor) -> list[int]:
    """The first position that each query sees; a window alone needs nothing of the device."""
    if sight.at is None or sight.starts is not None or sight.window is None:
        found: list[int] = first.tolist()
        return found
    return [max(0, sight.at + n - sight.window + 1) for n in range(len(sight.queries))]


def runs(positions: Tensor) -> list[tuple[int, int, int]]:
    """Consecutive positions as (begin, end, position of the first)."""
    begins = torch.cat((positions.new_zeros(1), (positions.diff() != 1).nonzero()[:, 0] + 1))
    starts, firsts = begins.tolist(), positions[begins].tolist()
    return list(zip(starts, [*starts[1:], len(positions)], firsts, strict=True))


def _seen(keys: list[tuple[int, int, int]], low: int, high: int) -> Iterator[tuple[slice, int]]:
    """(columns, position of the first) of the keys at positions `low .. high`, at most `KEY_SPAN` at a time."""
    for begin, end, position in keys:
        first, last = begin + max(0, low - position), min(end, begin + high - position)
        for start in range(first, last, KEY_SPAN):
            yield slice(start, min(start + KEY_SPAN, last)), position + start - begin


def _edges(
    sight: Visibility, first: Tensor | None, rows: slice, columns: slice, first_key: int, clear: int, at: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yields what is hidden from some rows: columns before `clear`, and those behind `at`, the first row's own."""
    width = columns.stop - columns.start
    left, right = min(width, max(0, clear - first_key)), max(0, min(width, at + 1 - first_key))
    spans = [slice(0, left), slice(right, width)] if left < right else [slice(0, width)]
    for span in spans:
        if span.stop > span.start:
            keys = sight.keys[columns][span]
            hidden = keys > sight.queries[rows, None]
            if first is not None:
                hidden = hidden | (keys < first[rows, None])
            yield span, hidden[:, None]


def _products(q: Tensor, k: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """Scores `[n, rows, cols]` of all pairs. q is scaled."""
    return torch.bmm(q[tile.heads, tile.rows], k[tile.heads, tile.keys].transpose(1, 2)).to(dtype)


def _hide(scores: Tensor, tile: Tile, r: int) -> Tensor:
    """-inf, in place, where a query does not see a key."""
    by_token = scores.unflatten(1, (-1, r))
    for columns, hidden in tile.edges:
        by_token[..., columns].masked_fill_(hidden, float("-inf"))
    return scores


@dataclass(frozen=True)
class TileKernel:
    """`parallel.context.AttentionKernel` by tiles. groups: key heads of a sample. softcap: bound c of the scores."""

    groups: int
    drop: WeightDropout | None = None
    softcap: float | None = None

    def of_queries(self, rows: slice) -> TileKernel:
        drop = self.drop
        return self if drop is None else replace(self, drop=replace(drop, words=drop.words[:, rows]))

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        scaled = heads_first(q * q.shape[-1] ** -0.5)
        return scaled, heads_first(k[:, :, :, None]), heads_first(v[:, :, :, None])

    def result(self, out: Tensor, q: Tensor) -> Tensor:
        return _tokens_first(out, q.shape).flatten(2).to(q.dtype)

    def output_gradient(self, dy: Tensor, y: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        delta = (dy.to(wide) * y.to(wide)).reshape(q.shape).sum(-1, keepdim=True)
        return heads_first(dy.reshape(q.shape)), heads_first(delta)[..., 0]

    def input_gradients(self, grads: Operands, inputs: Operands) -> Operands:
        q, k, v = inputs
        dq = _tokens_first(grads[0].mul_(q.shape[-1] ** -0.5), q.shape)
        dk, dv = (_tokens_first(x, (*k.shape[:3], 1, k.shape[3]))[:, :, :, 0] for x in grads[1:])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def forward(self, out: Tensor, lse: Tensor, operands: Operands, sight: Visibility) -> None:
        q, k, v = operands
        r = q.shape[1] // len(sight.queries)
        lowest = torch.finfo(lse.dtype).min
        for tile in tiles(sight, self.groups, r, query_tile(q, len(sight.queries), len(sight.keys))):
            heads, rows, keys = tile[:3]
            weights = _products(q, k, tile, lse.dtype)
            if self.softcap is not None:
                weights.div_(self.softcap).tanh_().mul_(self.softcap)
            weights = _hide(weights, tile, r)
            most = weights.amax(-1).clamp_(min=lowest)  # a row that sees nothing here gives no NaN
            weights.sub_(most[..., None]).exp_()
            own_lse = weights.sum(-1).log_().add_(most)
            if self.drop is not None:
                weights = self.drop(weights, heads, rows, sight.keys[keys])
            result, sums = out[heads, rows], lse[heads, rows]
            new = own_lse if tile.alone else torch.logaddexp(sums, own_lse)
            scale = (most - new.clamp(min=lowest)).exp_()[..., None]
            part = torch.bmm(weights.to(v.dtype), v[heads, keys])
            if tile.alone:
                torch.mul(part, scale, out=result)
            else:
                result.mul_((sums - new.clamp(min=lowest)).exp_()[..., None]).addcmul_(part.to(scale.dtype), scale)
            sums.copy_(new)

    def backward(
        self, grads: Operands, dy: Tensor, delta: Tensor, lse: Tensor, operands: Operands, sight: Visibility
    ) -> None:
        q, k, v = operands
        dq, dk, dv = grads
        r = q.shape[1] // len(sight.queries)
        for tile in tiles(sight, self.groups, r, query_tile(q, len(sight.queries), len(sight.keys))):
            heads, rows, keys = tile[:3]
            weights = _products(q, k, tile, lse.dtype)
            slope = None
            if self.softcap is not None:
                weights.div_(self.softcap).tanh_()
                slope = 1 - weights.square()  # before masking, which would leave -inf here
                weights.mul_(self.softcap)
            weights = _hide(weights, tile, r).sub_(lse[heads, rows, None]).exp_()
            dweights = torch.bmm(dy[heads, rows], v[heads, keys].transpose(1, 2)).to(lse.dtype)
            kept = weights
            if self.drop is not None:
                dweights, kept = (self.drop(x, heads, rows, sight.keys[keys]) for x in (dweights, weights))
            _add(dv[heads, keys], kept.to(v.dtype).transpose(1, 2), dy[heads, rows])
            dscores = dweights.sub_(delta[heads, rows, None]).mul_(weights)
            dscores = (dscores if slope is None else dscores.mul_(slope)).to(q.dtype)
            _add(dq[heads, rows], dscores, k[heads, keys])
            _add(dk[heads, keys], dscores.transpose(1, 2), q[heads, rows])


def _add(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target += a @ b."""
    if target.dtype == a.dtype:
        target.baddbmm_(a, b)
    else:
        target.add_(torch.bmm(a, b))


def heads_first(x: Tensor) -> Tensor:
    """`[s, b, g, r, d]` -> `[b * g, s * r, d]`."""
    s, b, g, r, d = x.shape
    return x.permute(1, 2, 0, 3, 4).reshape(b * g, s * r, d)


def _tokens_first(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`[b * g, s * r, d]` -> `shape`, `[s, b, g, r, d]`."""
    s, b, g, r, d = shape
    return x.view(b, g, s, r, d).permute(2, 0, 1, 3, 4)


def sinks_by_query(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """Logits of heads `[g * r]` as the log-sums of queries `[s, b, g, r, d]` lie: `[b * g, s * r]`."""
    if sinks is None:
        return None
    s, b, g, r, _ = q.shape
    wide = sinks.to(torch.promote_types(q.dtype, torch.float32))
    return wide.view(1, g, 1, r).expand(b, g, s, r).reshape(b * g, s * r)


@Uncompiled
def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Visibility,
    drop: WeightDropout | None = None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of what is seen: `[s, b, g, r, d]`, `[k, b, g, d]` -> `[s, b, g * r * d]`.

    softcap: bound of the scores. sinks: logits of heads `[g * r]` without a value.
    """
    kernel, alone = TileKernel(q.shape[2], drop, softcap), Axis.single("cp_ring")
    return ring_attention(q, k, v, lambda _: sight, alone, kernel, sinks_by_query(sinks, q))
