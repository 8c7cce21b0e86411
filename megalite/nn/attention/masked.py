"""Attention to packed documents, in sliding windows, with caps and sinks on a GPU, by the library's kernels.

varlen    `torch.nn.attention.varlen`: documents as sequences of their own, windows as the kernel's; 16 bits
flex      `torch.nn.attention.flex_attention`: compiled, whole blocks that nobody sees are left out; caps and sinks too

`choose` tries them once for each dtype, against tiles.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.nn.uncompiled import Uncompiled
from megalite.visibility import Visibility

Attend = Callable[..., Tensor]
"""(q, k, v, sight) -> the result; flex also takes a cap and sinks."""
BLOCK = 128
"""Queries and keys of a block of flex attention."""


@Uncompiled
def _varlen(q: Tensor, k: Tensor, v: Tensor, sight: Visibility) -> Tensor:
    """Every document a sequence: a query's distance to the first that it sees is told by documents or the window."""
    from torch.nn.attention.varlen import varlen_attn

    s, b, g, r, d = q.shape
    if sight.starts is None:  # a sample is one document: the host needs nothing from the device
        bounds, longest = torch.arange(0, b * s + 1, s, dtype=torch.int32, device=q.device), s
    elif sight.documents is not None:
        bounds, longest = sight.documents.bounds, sight.documents.longest
    else:
        begins = (sight.starts.expand(b, s) == sight.queries).flatten().nonzero()[:, 0]
        bounds = torch.cat((begins, begins.new_tensor([b * s]))).to(torch.int32)
        longest = int(bounds.diff().max())
    grouped: Any = {}
    if r > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        grouped = {"enable_gqa": True}
    elif r > 1:
        k, v = k.repeat_interleave(r, 2), v.repeat_interleave(r, 2)
    query, key, value = (x.transpose(0, 1).reshape(b * s, -1, d) for x in (q, k, v))
    window = (-1 if sight.window is None else sight.window - 1, 0)
    y: Any = varlen_attn(query, key, value, bounds, bounds, longest, longest, window_size=window, **grouped)
    joined: Tensor = y.view(b, s, g * r * d).transpose(0, 1)
    return joined


@functools.cache
def _flex() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention), torch.compile(seen_blocks)


@Uncompiled
def _flexible(
    q: Tensor, k: Tensor, v: Tensor, sight: Visibility, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """A sink takes its part of a softmax whose sum is known, so it scales what is there without it."""
    attend, blocks_of = _flex()
    s, b, g, r, d = q.shape
    query = q.permute(1, 2, 3, 0, 4).reshape(b, g * r, s, d)
    key, value = (x.permute(1, 2, 0, 3) for x in (k, v))
    how = {"score_mod": None if softcap is None else capped(softcap), "block_mask": block_mask(sight, b, s, blocks_of)}
    y, lse = attend(query, key, value, enable_gqa=r > 1, return_lse=True, **how)
    if sinks is not None:
        y = y * torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])[..., None].to(y.dtype)
    joined: Tensor = y.permute(2, 0, 1, 3).reshape(s, b, g * r * d)
    return joined


def capped(softcap: float) -> Callable[..., Tensor]:
    """Scores bounded by `softcap`, as flex_attention takes it."""

    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def block_mask(sight: Visibility, b: int, s: int, blocks_of: Callable[..., tuple[Tensor, ...]]) -> Any:
    """Flex attention's description of who sees whom, made from the first key of each query, never from s x s."""
    from torch.nn.attention.flex_attention import BlockMask

    first, starts, window = sight.first, sight.starts, sight.window
    if first is None:
        first = torch.zeros(1, s, dtype=torch.int64, device=sight.queries.device)
    begins = None if starts is None else starts.expand(b, s)

    def seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shown = key <= query
        if window is not None:
            shown = shown & (key > query - window)
        return shown if begins is None else shown & (key >= begins[sample, query])

    part, in_part, whole, in_whole = blocks_of(first)
    return BlockMask.from_kv_blocks(part, in_part, whole, in_whole, BLOCK, seen, (s, s))


def seen_blocks(first: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each block of queries the blocks of keys that some of them see in part, and those that all see whole: how many
    `[b, 1, n]`, and which come first `[b, 1, n, n]`, int32. first: int64 `[b, s]`, the first key that a query sees."""
    s = first.shape[1]
    n = -(-s // BLOCK)
    low = F.pad(first, (0, n * BLOCK - s), value=s).view(len(first), 1, n, BLOCK).amin(-1)
    high = F.pad(first, (0, n * BLOCK - s), value=0).view(len(first), 1, n, BLOCK).amax(-1)
    at = torch.arange(n, device=first.device)
    seen = (at <= at[:, None]) & (at >= low[..., None] // BLOCK)
    whole = (at < at[:, None]) & (at * BLOCK >= high[..., None])
    found = []
    for blocks in (seen & ~whole, whole):
        order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        found += [blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)]
    return found[0], found[1], found[2], found[3]


MASKED: dict[str, Attend] = {"varlen": _varlen, "flex": _flexible}
