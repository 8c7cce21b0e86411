"""Attention to a part of the keys by the library's fused kernels, which give the logarithm of each query's sum (`lse`).

A ring sees the keys in parts. What a part holds for queries at rising positions is a few rectangles: whole ones, which
lie before the queries, and squares on the diagonal, which are causal::

    rank 0 of 2     keys 0    keys 3        keys 1    keys 2        its own: one causal square
    chunk 0         causal                                          rank 1's: one whole rectangle
    chunk 3         causal    causal        whole     whole

The kernel's backward computes P = exp(S - lse) and delta = rowsum(dO * O) from what it is given, so with the final lse
and result it gives each rectangle's share of the gradient (FlashAttention-2, arXiv 2307.08691).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megalite.nn.attention import masked
from megalite.nn.attention.tiles import TileKernel, heads_first, runs
from megalite.parallel.context import Operands
from megalite.visibility import Visibility

aten = torch.ops.aten


def rectangles(sight: Visibility) -> Iterator[tuple[slice, slice, bool]]:
    """(queries, keys, whether causal) of all that is seen, for queries and keys at rising positions; whoever sees
    some later key than its first query's has the keys of all its positions."""
    queries, keys = sight.queries, sight.keys
    if len(queries) == len(keys) and bool((queries == keys).all()):
        yield slice(0, len(queries)), slice(0, len(keys)), True
        return
    whole: list[tuple[int, int, int]] = []  # (begin, end, keys before); neighbours that see the same are one
    for begin, end, position in runs(queries):
        before = int(torch.searchsorted(keys, position))
        if whole and whole[-1][1:] == (begin, before):
            whole[-1] = (whole[-1][0], end, before)
        else:
            whole.append((begin, end, before))
        seen = int(torch.searchsorted(keys, position + end - begin))
        if seen > before:
            assert seen - before == end - begin, "keys on the diagonal that are not the queries' own"
            yield slice(begin, end), slice(before, seen), True
    for begin, end, before in whole:
        if before:
            yield slice(begin, end), slice(0, before), False


def seen_by(sight: Visibility) -> list[tuple[slice, slice, bool]]:
    """The same, worked out once."""
    return sight.shared.once("rectangles", lambda: list(rectangles(sight)))


def merge(out: Tensor, lse: Tensor, part: Tensor, sums: Tensor, kept: Tensor | None = None, p: float = 0.0) -> None:
    """Merges the result of a part `[n, r, s, d]` and its log-sums `[n, r, s]`, -inf where a query sees none of it.
    kept: log-sums of the weights of which the result is made, where others were dropped with probability p."""
    own = flat(sums[..., None])[..., 0].to(lse.dtype)
    new = torch.logaddexp(lse, own)
    finite = new.clamp(min=torch.finfo(new.dtype).min)
    out.mul_((lse - finite).exp_()[..., None])
    weight = ((own if kept is None else flat(kept[..., None])[..., 0].to(lse.dtype)) - finite).exp_()
    out.addcmul_(flat(part).to(out.dtype), weight[..., None], value=1 / (1 - p))
    lse.copy_(new)


class FlashKernel(TileKernel):
    """`parallel.context.AttentionKernel` of the library. Causal: for documents, windows and caps see `parts.py`."""

    def output_gradient(self, dy: Tensor, y: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return heads_first(dy.reshape(q.shape)), heads_first(y.reshape(q.shape))

    def forward(self, out: Tensor, lse: Tensor, operands: Operands, sight: Visibility) -> None:
        q, k, v = operands
        r = q.shape[1] // len(sight.queries)
        for queries, keys, causal in seen_by(sight):
            rows = slice(queries.start * r, queries.stop * r)
            part, sums = _attend(*_by_heads(r, q[:, rows], k[:, keys], v[:, keys]), causal)
            masked.on_device(merge, part)(out[:, rows], lse[:, rows], part, sums)

    def backward(
        self, grads: Operands, dy: Tensor, delta: Tensor, lse: Tensor, operands: Operands, sight: Visibility
    ) -> None:
        """delta: the final result."""
        q, k, v = operands
        r = q.shape[1] // len(sight.queries)
        seed = sight.shared.once("seed", lambda: _no_seed(q.device))
        for queries, keys, causal in seen_by(sight):
            rows = slice(queries.start * r, queries.stop * r)
            inputs = _by_heads(r, q[:, rows], k[:, keys], v[:, keys])
            result, dresult, sums = (rows_by_heads(x[:, rows], r) for x in (delta, dy, lse[..., None]))
            dq, dk, dv = _attend_backward(dresult, *inputs, result, sums[..., 0], causal, seed)
            grads[0][:, rows].add_(flat(dq))  # += would copy the sum to where it is
            for grad, more in zip(grads[1:], (dk, dv), strict=True):
                grad[:, keys].add_(more.sum(1) if r > 1 else more[:, 0])


def rows_by_heads(x: Tensor, r: int) -> Tensor:
    """`[n, s * r, d]` -> `[n, r, s, d]`."""
    split: Tensor = x.unflatten(1, (-1, r))
    return split.transpose(1, 2)


def _by_heads(r: int, q: Tensor, k: Tensor, v: Tensor) -> Operands:
    """For the kernels: as many heads of keys as of queries, none of them copied."""
    n, length, d = k.shape
    return rows_by_heads(q, r), k[:, None].expand(n, r, length, d), v[:, None].expand(n, r, length, d)


def flat(x: Tensor) -> Tensor:
    """`[n, r, s, d]` -> `[n, s * r, d]`."""
    return x.transpose(1, 2).flatten(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(result `[n, r, s, d]`, lse `[n, r, s]`); queries are scaled."""
    found: Any
    if q.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=1.0)
    else:
        found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=1.0)
    return found[0], found[1]


def _attend_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool, seed: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    found: Any
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = backward(dy, q, k, v, y, lse, 0.0, causal, scale=1.0)
    else:
        backward = aten._scaled_dot_product_flash_attention_backward
        lengths = (None, None, q.shape[2], k.shape[2])
        found = backward(dy, q, k, v, y, lse.contiguous(), *lengths, 0.0, causal, *seed, scale=1.0)
    return found[0], found[1], found[2]


def _no_seed(device: torch.device) -> tuple[Tensor, Tensor]:
    """(Seed, offset) of the dropout of which there is none."""
    seed = torch.zeros(2, dtype=torch.uint64, device=device)
    return seed, seed[0].clone()
