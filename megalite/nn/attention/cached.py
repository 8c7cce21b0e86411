"""Attention in generation: the new tokens' queries against the keys and values of all tokens so far.

    a prompt            as in training, at any length; a later chunk of it by tiles, against the cache
    one token           torch's kernel, where it sees all keys and they are all that counts; else one product of its
                        heads with all cached keys, and one with all values

Where ranks share a sequence (context parallelism) a prompt is cut as in training and each rank caches the keys of its
own tokens, as they are before heads are traded. A generated token is computed on all of these ranks; one of them, in
turn, caches it. Each attends to its own part, and the parts are merged by their sums (Flash-Decoding): a cache never is
on one rank, and one message of `[b, heads, d + 1]` a layer is all that travels.
"""

import torch
from torch import Tensor

from megalite.comm import all_reduce_
from megalite.microbatch import Microbatch
from megalite.nn.attention.context import context_attention
from megalite.nn.attention.core import AttentionCore, fused_attention
from megalite.nn.kv_cache import LayerCache
from megalite.visibility import Visibility


def cached_attention(
    core: AttentionCore,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    microbatch: Microbatch,
    cache: LayerCache,
    sinks: Tensor | None,
) -> Tensor:
    """Attends like `core` and adds k, v to the cache: q `[s, b, g, r, d]`, k, v `[s, b, g, d]` -> `[s, b, g * r * d]`.

    microbatch: `places` of the tokens in the sequence where s is 1 or ranks share the prompt.
    """
    starts, places = microbatch.document_starts, microbatch.places
    if microbatch.order is not None:
        cache.append(k, v, places)
        return context_attention(core, q, k, v, microbatch, sinks, training=False)
    if len(q) > 1 or places is None:
        k, v = cache.append(k, v, starts=starts)
        return core(q, k, v, sinks=sinks, document_starts=starts, sample_ids=microbatch.sample_ids)
    k, v, hidden = with_token(core, k, v, microbatch, cache)
    on_cpu = q.device.type == "cpu"
    plain = core.axes.size == 1 and hidden is None and sinks is None and core.softcap is None
    if plain and not (on_cpu and q.shape[3] > 1):  # its kernel wants keys for every head
        wide = core.tile_dtype(q) if on_cpu else core.product_dtype or q.dtype
        return fused_attention(q.to(wide), k.to(wide), v.to(wide)).to(q.dtype)
    return attend_token(core, q, k, v, hidden, sinks)


def with_token(
    core: AttentionCore, k: Tensor, v: Tensor, microbatch: Microbatch, cache: LayerCache
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Adds those of one token, on one of the ranks that share the sequence: (all keys and values of this rank, what is
    hidden of them)."""
    starts, places, axes = microbatch.document_starts, microbatch.places, core.axes
    assert places is not None
    mine = axes.size == 1 or int(places) % axes.size == axes.heads.rank + axes.heads.size * axes.ring.rank
    kept = slice(0, int(mine))
    k, v = cache.append(k[kept], v[kept], places[kept] if axes.size > 1 else None, starts)
    if starts is None and core.window is None:
        return k, v, None
    keys = torch.arange(len(k), device=k.device) if cache.places is None else cache.places
    queries = keys[-1:] if cache.places is None else places  # behind a prefix, if there is one
    sight = Visibility.of(queries, keys, window=core.window, document_starts=starts)
    return k, v, ~sight.dense().view(-1, 1, 1, len(k))


def attend_token(
    core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of one token a sequence: `[1, b, g, r, d]` -> `[1, b, g * r * d]`.

    k, v: `[n, b, g, d]`, this rank's part of what all ranks of `core.axes` hold; n may be 0. hidden: bool
    `[b, 1, 1, n]`. Sums are taken in fp32 or wider.
    """
    dtype, axes = core.tile_dtype(q), core.axes
    query, keys, values = q[0].to(dtype), k.to(dtype).permute(1, 2, 3, 0), v.to(dtype).permute(1, 2, 0, 3)
    wide = torch.promote_types(dtype, torch.float32)
    scores = torch.matmul(query * q.shape[-1] ** -0.5, keys).to(wide)  # [b, g, r, n]
    if core.softcap is not None:
        scores = torch.tanh(scores / core.softcap) * core.softcap
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    lowest = scores.new_full((*scores.shape[:3], 1), torch.finfo(wide).min)
    most = torch.cat((lowest, scores), -1).amax(-1, keepdim=True)
    if sinks is not None:
        logits = sinks.to(wide).view(1, *scores.shape[1:3], 1)
        most = torch.maximum(most, logits)
    for axis in (axes.heads, axes.ring):
        all_reduce_(most, axis, op="max")
    weights = (scores - most).exp_()
    total = torch.cat((torch.matmul(weights.to(dtype), values).to(wide), weights.sum(-1, keepdim=True)), -1)
    for axis in (axes.heads, axes.ring):
        all_reduce_(total, axis)
    below = total[..., -1:]
    if sinks is not None:
        below = below + (logits - most).exp()
    return (total[..., :-1] / below).flatten(1)[None].to(q.dtype)
