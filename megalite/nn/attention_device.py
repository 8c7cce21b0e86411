"""Attention to packed documents and in sliding windows on a GPU, by the library's kernels.

varlen    `torch.nn.attention.varlen`: documents as sequences of their own, windows as the kernel's; 16 bits
flex      `torch.nn.attention.flex_attention`: compiled, whole blocks that nobody sees are left out
tiled     products of tiles (`attention_tiles`): always there

Which of them works is found out once for each dtype, by computing a small case and its gradient and comparing it with
the tiles; the choice is printed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalite.nn.attention_tiles import tiled_attention
from megalite.visibility import Visibility

logger = logging.getLogger(__name__)

Attend = Callable[[Tensor, Tensor, Tensor, Visibility], Tensor]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's has no type
def device_attention(q: Tensor, k: Tensor, v: Tensor, sight: Visibility) -> Tensor:
    """As `tiled_attention`, for the last s of k tokens."""
    name = kernel_of(q.device, q.dtype) if len(q) == len(k) else "tiled"
    return KERNELS[name](q, k, v, sight)


@functools.cache
def kernel_of(device: torch.device, dtype: torch.dtype) -> str:
    """The first of the kernels that gives what the tiles give."""
    chosen = next(name for name, attend in KERNELS.items() if name == "tiled" or _works(attend, device, dtype))
    logger.info("attention to documents and windows in %s on %s: %s", str(dtype).rpartition(".")[2], device, chosen)
    return chosen


def _works(attend: Attend, device: torch.device, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((256, 2, 2, 2, 64), (256, 2, 2, 64), (256, 2, 2, 64), (256, 2, 256))
    )
    at = torch.arange(256, device=device)
    starts = torch.stack((at // 100 * 100, at * 0))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    try:
        for window in (None, 70):
            sight = Visibility.of(at, at, window=window, document_starts=starts)
            found, expected = (
                (y, *torch.autograd.grad(y, inputs, dy))
                for y in (way(q, k, v, sight) for way in (attend, tiled_attention))
            )
            worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
            if not worst < 0.02:
                return False
    except Exception as error:  # whatever a library that cannot do it raises
        logger.debug("attention kernel: %s", error)
        return False
    return True


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


KERNELS: dict[str, Attend] = {"varlen": _varlen, "flex": _flexible, "tiled": tiled_attention}
