"""Kernels that a GPU would choose, in the place of those that torch chooses where there is no memory."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.gradient import Node

BLOCK = 128
_SDPA = torch.nn.functional.scaled_dot_product_attention
aten = torch.ops.aten


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The kernel that a GPU chooses, where it can; without memory torch would choose the one that keeps all weights."""
    out: Tensor
    if attn_mask is not None or q.dtype == torch.float64:
        return _SDPA(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if q.dtype in (torch.bfloat16, torch.float16):
        out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return out
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) if enable_gqa else x for x in (k, v))
    out = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout_p, is_causal, scale=scale)[0]
    return out


class _RmsNorm(Node):
    """Reads, writes and keeps what the kernel of a GPU does; torch's own, without memory, keeps three times as much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.sum(-1, keepdim=True, dtype=torch.float32))
        return x.clone() if weight is None else x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        if weight is None:
            return dy * x, None
        return dy * weight, dy.reshape(-1, x.shape[-1]).sum(0, dtype=weight.dtype)


def fused_rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """In the place of `torch.nn.functional.rms_norm`."""
    return _RmsNorm.apply(x, weight)


class CompiledAttention(Node):
    """In the place of compiled flex attention, a launch forward and one backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        order = sorted(range(query.dim()), key=query.stride, reverse=True)  # results lie as queries do
        lying, columns = query.permute(order), value.shape[-1]
        made = query.new_empty(*lying.shape[:-1], columns)
        out = made.permute([order.index(dim) for dim in range(query.dim())])
        heads = out.stride(0) == out.shape[1] * out.stride(1)  # of all samples, as one dimension of the memory
        rows, into = (query.flatten(0, 1), out.flatten(0, 1)) if heads else (lying.flatten(1, 2), made.flatten(1, 2))
        torch.bmm(rows, rows.new_empty(len(rows), rows.shape[-1], columns), out=into)
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return a_product(query), torch.empty_like(key), torch.empty_like(value)


def compiled_attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Any:
    """As `flex_attention`."""
    return CompiledAttention.apply(query, key, value)


def a_product(x: Tensor) -> Tensor:
    """A launch whose result is like x."""
    rows = x.reshape(-1, *x.shape[-2:])
    return torch.bmm(rows, rows.new_empty(len(rows), x.shape[-1], x.shape[-1])).view(x.shape)


def compiled_blocks(first: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
    """In the place of a compiled mask's blocks, a launch."""
    b, n, m = len(first), -(-len(queries) // BLOCK), -(-len(keys) // BLOCK)
    shapes = [*[(b, 1, n), (b, 1, n, m)] * 2, *[(b, 1, m), (b, 1, m, n)] * 2]
    return first.new_zeros(shapes[0], dtype=torch.int32), *(first.new_empty(x, dtype=torch.int32) for x in shapes[1:])


class _Scaled(Node):
    """In the place of what sinks and dropout do to a result, a launch, and one for each gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *beside: Tensor | None) -> Tensor:
        ctx.save_for_backward(y, *beside)
        return y.permute(2, 0, 1, 3).clone(memory_format=torch.contiguous_format).flatten(2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, *beside = ctx.saved_tensors
        b, heads, s, d = y.shape
        own = dy.view(s, b, heads, d).permute(1, 2, 0, 3) * y
        return own, *(None if x is None else torch.zeros_like(x) for x in beside)


def compiled_merge(out: Tensor, lse: Tensor, part: Tensor, sums: Tensor, *_: Any) -> None:
    """In the place of merging a part, a launch for the result and one for the log-sums."""
    r = part.shape[1]
    out.unflatten(1, (-1, r)).transpose(1, 2).mul_(part)
    lse.unflatten(1, (-1, r)).transpose(1, 2).mul_(sums)


def compiled_shares(dy: Tensor, delta: Tensor, lse: Tensor, part: Tensor, *sums: Any) -> tuple[Tensor, ...]:
    """In the place of the gradients of a part, a launch for each."""
    return torch.mul(part, dy.to(part.dtype)), *(x + lse[..., 0] for x in sums if isinstance(x, Tensor))


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of `nn.attention.masked.compiled`."""
    kernels: dict[str, Callable[..., Any]] = {
        # keys of dropout, a launch, and their cast, a launch for each
        "words_of": lambda key, samples, queries, groups, r, first_head: queries.new_zeros(
            len(samples) * groups, len(queries) * r
        ),
        "narrow_words": lambda words, keys, r: (
            words.new_zeros(len(words), r, words.shape[1] // r, dtype=torch.int32),
            keys.new_zeros(len(keys), dtype=torch.int32),
        ),
        "scaled": lambda y, kept, lse, sinks, p: _Scaled.apply(y, kept, lse, sinks),
        "merge": compiled_merge,
        "shares": compiled_shares,
        "shares_of_kept": compiled_shares,
    }
    return kernels[function.__name__]
