"""Attention to packed documents, in sliding windows, with caps, sinks and dropout on a GPU, by the library's kernels.

varlen    `torch.nn.attention.varlen`: documents as sequences of their own, windows as the kernel's; 16 bits
flex      `torch.nn.attention.flex_attention`: compiled, whole blocks that nobody sees are left out; the others too

Flex attention changes scores, not weights. Dropped weights are scores of -inf of which the sum must not know, so it is
computed twice: y' and its log-sums l' of the keys that are kept, and the log-sums l of all, with values of few
channels. Then y = y' exp(l' - l) / (1 - p).

`choose` tries them once for each dtype, against tiles.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.inventory import NARROW
from megalite.nn.attention.tiles import WeightDropout
from megalite.nn.dropout import combine, keeps, least_word, narrowed
from megalite.nn.uncompiled import Uncompiled
from megalite.visibility import Visibility

P = ParamSpec("P")
T = TypeVar("T")
Attend = Callable[..., Tensor]
"""(q, k, v, sight) -> the result; flex also takes a cap, sinks and dropout."""
BLOCK, MOST_VARIANTS = 128, 64
"""Queries and keys of a block of flex attention; kinds of attention that it is compiled for."""


@Uncompiled
def _varlen(q: Tensor, k: Tensor, v: Tensor, sight: Visibility) -> Tensor:
    """Every document a sequence: a query's distance to the first that it sees is told by documents or the window."""
    from torch.nn.attention.varlen import varlen_attn

    s, b, g, r, d = q.shape
    bounds, longest = sight.shared.once(("bounds", b), lambda: _bounds(sight, b))
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


def _bounds(sight: Visibility, b: int) -> tuple[Tensor, int]:
    """(Where each document of all b samples begins, and the end, int32; tokens of the longest one)."""
    s, device = len(sight.queries), sight.queries.device
    if sight.starts is None:  # a sample is one document: the host needs nothing from the device
        return torch.arange(0, b * s + 1, s, dtype=torch.int32, device=device), s
    if sight.documents is not None:
        return sight.documents.bounds, sight.documents.longest
    begins = (sight.starts.expand(b, s) == sight.queries).flatten().nonzero()[:, 0]
    bounds = torch.cat((begins, begins.new_tensor([b * s]))).to(torch.int32)
    return bounds, int(bounds.diff().max())


@functools.cache
def flex() -> tuple[Any, Any]:
    """(flex_attention, `seen_blocks`), compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    # Trials, masks, caps and evaluation compile it once more each; beyond the limit it computes all scores at once.
    limits: Any = importlib.import_module("torch._dynamo.config")
    limits.recompile_limit = max(limits.recompile_limit, MOST_VARIANTS)
    return torch.compile(flex_attention), torch.compile(seen_blocks)


@functools.cache
def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """As a kernel of a device, where torch can make kernels."""
    kernel: Callable[P, T] = torch.compile(function) if find_spec("triton") else function
    return kernel


def on_device(function: Callable[P, T], x: Tensor) -> Callable[P, T]:
    """As a kernel where x is on a device."""
    return function if x.device.type == "cpu" else compiled(function)


def words_of(key: Tensor, sample_ids: Tensor, queries: Tensor, groups: int, r: int, first_head: int) -> Tensor:
    """Dropout keys of attention weights, one for each sample, head and query: `[b * g, s * r]`."""
    heads = torch.arange(first_head, first_head + groups * r, device=queries.device)
    keys = combine(0, combine(key, sample_ids)[:, None] ^ combine(1, heads)[None])
    keys = combine(2, keys[..., None] ^ combine(3, queries))  # [b, g * r, s]
    return keys.view(len(sample_ids) * groups, r, -1).transpose(1, 2).flatten(1)


def narrow_words(words: Tensor, keys: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Words of queries `[n, s * r]` as `[n, r, s]`, and of keys at these positions `[k]`, for `nn.dropout.keeps`."""
    return narrowed(words.unflatten(1, (-1, r)).transpose(1, 2).contiguous(), keys)


@Uncompiled
def _flexible(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Visibility,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    drop: WeightDropout | None = None,
) -> Tensor:
    """A sink takes its part of a softmax whose sum is known, so it scales what is there without it."""
    s, b, g, r, d = q.shape
    query = q.permute(1, 2, 3, 0, 4).reshape(b, g * r, s, d)
    key, value = (x.permute(1, 2, 0, 3) for x in (k, v))
    y, kept, lse = attended(query, key, value, sight, softcap, drop, enable_gqa=r > 1)
    if drop is None and sinks is None:
        return y.permute(2, 0, 1, 3).reshape(s, b, g * r * d)
    of_kept, p = (None, 0.0) if drop is None else (kept, drop.p)
    return on_device(scaled, y)(y, of_kept, lse, sinks, p)


def scaled(y: Tensor, kept: Tensor | None, lse: Tensor, sinks: Tensor | None, p: float) -> Tensor:
    """The part of a result `[b, heads, s, d]` that sinks, and log-sums with weights that were dropped, leave of it:
    `[s, b, heads * d]`."""
    weight = None if kept is None else (kept - lse).exp() * (1 / (1 - p))
    if sinks is not None:
        beside = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
        weight = beside if weight is None else weight * beside
    assert weight is not None
    return (y * weight[..., None].to(y.dtype)).permute(2, 0, 1, 3).flatten(2)


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Visibility,
    softcap: float | None,
    drop: WeightDropout | None,
    **how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(Result of the weights that are kept, their log-sums, the log-sums of all; -inf of none), of queries `[b, heads,
    s, d]` and keys `[b, groups, k, d]`."""
    attend, blocks_of = flex()
    b = len(query)
    blocks = sight.shared.once(("blocks", b), lambda: block_mask(sight, b, blocks_of))
    # A tensor: the compiler makes a second number a symbol, of which flex attention has no gradient.
    cap = None
    if softcap is not None:
        cap = sight.shared.once(("cap", softcap), lambda: torch.full((), softcap, device=query.device))
    how |= {"block_mask": blocks, "return_lse": True}
    y: Tensor
    lse: Tensor
    if drop is None:
        y, lse = attend(query, key, value, score_mod=bent(cap), **how)
        return y, lse, lse
    words, channels = on_device(narrow_words, query)(
        drop.words, sight.keys, query.shape[1] * len(query) // len(drop.words)
    )
    hides = bent(cap, words.view(query.shape[:3]), channels, least_word(drop.p))
    y, kept = attend(query, key, value, score_mod=hides, **how)
    lse = attend(query, key, value[..., :NARROW], score_mod=bent(cap), **how)[1]
    return y, kept, lse


def bent(
    cap: Tensor | None, words: Tensor | None = None, channels: Tensor | None = None, least: int = 0
) -> Callable[..., Tensor] | None:
    """Scores bounded by a cap, and -inf where a weight is dropped, as flex_attention takes it.

    words, channels: of queries `[b, heads, s]` and of keys `[k]`; least: of a word that is kept (`nn.dropout.keeps`).
    """
    if cap is None and words is None:
        return None

    def bend(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if cap is not None:
            score = cap * (2 * torch.sigmoid(2 * score / cap) - 1)  # a tanh, by the exponentials of softmax
        if words is None or channels is None:
            return score
        return torch.where(keeps(words[sample, head, query], channels[key], least), score, -torch.inf)

    return bend


def block_mask(sight: Visibility, b: int, blocks_of: Callable[..., tuple[Tensor, ...]]) -> Any:
    """Flex attention's description of who sees whom, made from the first key of each query, never from s x k.

    b: rows of the batch, as many for each of the sight's samples.
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries, keys, first = sight.queries, sight.keys, sight.first
    if first is None:
        first = torch.zeros(1, len(queries), dtype=torch.int64, device=queries.device)
    elif 1 < len(first) < b:
        first = first.repeat_interleave(b // len(first), 0)
    seen = _by_place(queries, keys, first.expand(b, -1)) if sight.at is None else _by_number(sight, b)
    names = ("num_blocks", "indices")
    kinds = [f"{kind}{side}_{name}" for side in ("kv", "q") for kind in ("", "full_") for name in names]
    blocks: dict[str, Any] = dict(zip(kinds, blocks_of(first, queries, keys), strict=True))
    return BlockMask((len(queries), len(keys)), **blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=seen)


def _by_number(sight: Visibility, b: int) -> Callable[..., Tensor]:
    """A query sees a key, by their numbers; both begin at position 0."""
    window, begins = sight.window, None if sight.starts is None else sight.starts.expand(b, -1)

    def seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shown = key <= query
        if window is not None:
            shown = shown & (key > query - window)
        return shown if begins is None else shown & (key >= begins[sample, query])

    return seen


def _by_place(queries: Tensor, keys: Tensor, first: Tensor) -> Callable[..., Tensor]:
    """A query sees a key, by their positions; first: `[b, s]`."""

    def seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = keys[key]
        return (place <= queries[query]) & (place >= first[sample, query])

    return seen


def seen_blocks(first: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
    """Of each block of queries the blocks of keys that some of them see in part, and those that all see whole: how many
    `[b, 1, n]`, and which come first `[b, 1, n, m]`, int32; then of each block of keys the blocks of queries.

    first: int64 `[b, s]`, the first position that a query sees. queries, keys: positions, `[s]` and `[k]`.
    """
    (low, high), (begin, end) = _ends(first[:, None]), _ends(queries)
    lowest, highest = _ends(keys)
    seen = (lowest <= end[:, None]) & (highest >= low[..., None])
    whole = (highest <= begin[:, None]) & (lowest >= high[..., None]) & (_filled(queries)[:, None] & _filled(keys))
    found = []
    for blocks in (seen & ~whole, whole, (seen & ~whole).mT, whole.mT):
        # A sort of them would give the same, but the compiler unrolls it, which takes long.
        number = blocks.cumsum(-1, dtype=torch.int32)
        at = torch.arange(blocks.shape[-1], dtype=torch.int32, device=blocks.device).expand_as(number)
        place = torch.where(blocks, number - 1, number[..., -1:] + at - number)
        found += [number[..., -1], torch.empty_like(number).scatter_(-1, place.long(), at)]
    return tuple(x.contiguous() for x in found)  # the kernel steps from block to block by one


def _ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest of each block, `[..., s]` -> `[..., n]`; the last block may be a short one."""
    short = -x.shape[-1] % BLOCK
    low, high = (F.pad(x, (0, short), value=fill).unflatten(-1, (-1, BLOCK)) for fill in (1 << 40, -1))
    return low.amin(-1), high.amax(-1)


def _filled(x: Tensor) -> Tensor:
    """Whether a block has all of its tokens."""
    return torch.arange(BLOCK, len(x) + BLOCK, BLOCK, device=x.device) <= len(x)


VARLEN, FLEX = "varlen", "flex"
MASKED: dict[str, Attend] = {VARLEN: _varlen, FLEX: _flexible}
