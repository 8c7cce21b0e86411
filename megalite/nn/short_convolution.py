"""What precedes the gated delta rule: a depthwise causal convolution, SiLU, queries and keys of length 1.

One function with a backward of its own: on a CPU it goes through the tokens block by block, each of which stays in the
cache from the first tap to the last division, and keeps nothing but its inputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.gradient import Node, widened

EPSILON = 1e-6
CACHED = 1 << 17
"""Elements that a CPU computes at a time."""


def convolved(
    x: Tensor, before: Tensor, weight: Tensor, key_size: int, starts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k `[n, b, H, dk]`, v `[n, b, H, r * dv]`), in fp32 or wider: silu of the convolution; q and k divided by
    their lengths, q by sqrt(dk), too.

    x: `[n, b, H, c]`, a head's query, key and values. before: the t - 1 inputs in front of x. weight: `[H, c, t]`.
    key_size: dk. starts: int64 `[b, n]`, where documents begin, counted from the first of x: no tap crosses that.
    """
    made: Any = _Convolved.apply(x, before, weight, key_size, starts)
    q, k, v = made
    return q, k, v


class _Convolved(Node):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, before: Tensor, weight: Tensor, key_size: int, starts: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, before, weight)
        ctx.key_size, ctx.starts = key_size, starts
        sizes = (key_size, key_size, x.shape[-1] - 2 * key_size)
        outs = tuple(torch.empty((*x.shape[:-1], size), dtype=_wide(x), device=x.device) for size in sizes)
        filters = _filters(weight)
        for begin, end in blocks(x):
            y, _ = _filtered(x, before, filters, starts, begin, end)
            parts = F.silu(y, inplace=True).split(sizes, -1)
            for out, part, scale in zip(outs[:2], parts, (key_size**-0.5, 1.0), strict=False):
                torch.mul(part, _inverse(part, scale), out=out[begin:end])
            outs[2][begin:end] = parts[2]
        return outs

    @staticmethod
    def backward(ctx: Any, *dmade: Tensor) -> Any:
        x, before, weight = ctx.saved_tensors
        reach, dk = len(before), ctx.key_size
        # sums over tokens come last: one pass a tap instead of two
        sums = torch.zeros((reach + 1, blocks(x)[0][1], *x.shape[1:]), dtype=_wide(x), device=x.device)
        dline = torch.zeros((reach + len(x), *x.shape[1:]), dtype=_wide(x), device=x.device)
        filters = _filters(weight)
        for begin, end in blocks(x):
            y, taps = _filtered(x, before, filters, ctx.starts, begin, end)
            made = F.silu(y)
            dy = torch.empty_like(y)
            dy[..., 2 * dk :] = dmade[2][begin:end]
            for at, scale in enumerate((dk**-0.5, 1.0)):
                part, grad = made[..., at * dk : (at + 1) * dk], dmade[at][begin:end]
                inverse = _inverse(part, scale)
                inner = (part * grad).sum(-1, keepdim=True) * inverse.pow(3).div_(-(scale**2))
                torch.addcmul(grad * inverse, part, inner, out=dy[..., at * dk : (at + 1) * dk])
            dy = torch.ops.aten.silu_backward(dy, y)
            for lag, (line, tap, seen) in enumerate(taps):
                back = dy if seen is None else dy * seen
                dline[reach + begin - lag : reach + end - lag].addcmul_(back, tap)
                sums[reach - lag, : end - begin].addcmul_(back, line)
        dline, dweight = dline.to(x.dtype), sums.sum((1, 2))
        return dline[reach:], dline[:reach], dweight.movedim(0, -1).to(weight.dtype), None, None


def _filtered(
    x: Tensor, before: Tensor, filters: Tensor, starts: Tensor | None, begin: int, end: int
) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor | None]]]:
    """(Convolution at those tokens; for each lag what it reads, its tap, whether a token sees it)."""
    reach = len(before)
    first = begin - reach
    line = x[first:end] if first >= 0 else torch.cat((before[first:], x[:end]))
    line = widened(line)
    taps: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for lag in range(reach + 1):
        seen = None
        if starts is not None and lag:
            source = torch.arange(begin - lag, end - lag, device=starts.device)
            seen = (source >= starts[:, begin:end]).t()[:, :, None, None]
        taps.append((line[reach - lag : reach - lag + end - begin], filters[reach - lag], seen))
    y = taps[0][0] * taps[0][1]
    for read, tap, seen in taps[1:]:
        y.addcmul_(read if seen is None else read * seen, tap)
    return y, taps


def _filters(weight: Tensor) -> Tensor:
    """Tap by tap, `[t, H, c]`."""
    return widened(weight.movedim(-1, 0)).contiguous()


def _inverse(x: Tensor, scale: float) -> Tensor:
    return torch.rsqrt(torch.linalg.vecdot(x, x)[..., None] + EPSILON).mul_(scale)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def blocks(x: Tensor, unit: int = 1) -> list[tuple[int, int]]:
    """[begin, end) of tokens that are computed together, `unit` or a multiple of it."""
    step = len(x) if x.device.type != "cpu" else unit * max(1, CACHED // (unit * x[0].numel()))
    return [(begin, min(len(x), begin + step)) for begin in range(0, len(x), step)]
