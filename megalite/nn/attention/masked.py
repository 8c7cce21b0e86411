"""Attention to packed documents and in sliding windows on a GPU, by the library's kernels.

varlen    `torch.nn.attention.varlen`: documents as sequences of their own, windows as the kernel's; 16 bits
flex      `torch.nn.attention.flex_attention`: compiled, whole blocks that nobody sees are left out

`choose` tries them once for each dtype, against tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalite.visibility import Visibility

Attend = Callable[[Tensor, Tensor, Tensor, Visibility], Tensor]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's has no type
def _varlen(q: Tensor, k: Tensor, v: Tensor, sight: Visibility) -> Tensor:
    """Every document a sequence: a query's distance to the first that it sees is told by documents or the window."""
    from torch.nn.attention.varlen import varlen_attn

    s, b, g, r, d = q.shape
    assert sight.starts is not None or sight.window is not None
    starts = torch.zeros(1, s, dtype=torch.int64, device=q.device) if sight.starts is None else sight.starts
    begins = (starts.expand(b, s) == sight.queries).flatten().nonzero()[:, 0]
    bounds = torch.cat((begins, begins.new_tensor([b * s]))).to(torch.int32)
    longest = int(bounds.diff().max())
    query, key, value = (
        x.transpose(0, 1).reshape(b * s, -1, d) for x in (q, k.repeat_interleave(r, 2), v.repeat_interleave(r, 2))
    )
    window = (-1 if sight.window is None else sight.window - 1, 0)
    y: Any = varlen_attn(query, key, value, bounds, bounds, longest, longest, window_size=window)
    joined: Tensor = y.view(b, s, g * r * d).transpose(0, 1)
    return joined


@functools.cache
def _flex() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention), create_block_mask


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's has no type
def _flexible(q: Tensor, k: Tensor, v: Tensor, sight: Visibility) -> Tensor:
    attend, block_mask = _flex()
    s, b, g, r, d = q.shape
    assert sight.first is not None
    first = sight.first.expand(b, s)

    def seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[sample, query])

    mask = block_mask(seen, b, None, s, s, device=q.device)
    query = q.permute(1, 2, 3, 0, 4).reshape(b, g * r, s, d)
    key, value = (x.permute(1, 2, 0, 3) for x in (k, v))
    y: Tensor = attend(query, key, value, block_mask=mask, enable_gqa=r > 1)
    return y.permute(2, 0, 1, 3).reshape(s, b, g * r * d)


MASKED: dict[str, Attend] = {"varlen": _varlen, "flex": _flexible}
