"""Attention where the sequence is cut over ranks: heads traded for tokens, then a ring or gathered keys, then back."""

import dataclasses

import torch
from torch import Tensor

from megalite.microbatch import Microbatch
from megalite.nn.attention.choose import FLASH, TILED, Need, choose
from megalite.nn.attention.core import AttentionCore
from megalite.nn.attention.flash import FlashKernel
from megalite.nn.attention.masked import FLEX
from megalite.nn.attention.parts import FlexKernel
from megalite.nn.attention.tiles import TileKernel, sinks_by_query
from megalite.nn.uncompiled import Uncompiled
from megalite.parallel.context import (
    Gathering,
    gathered_attention,
    ring_attention,
    sequence_order,
    trade_heads_for_tokens,
    trade_tokens_for_heads,
)
from megalite.visibility import Visibility


@Uncompiled
def context_attention(
    core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, microbatch: Microbatch, sinks: Tensor | None, training: bool
) -> Tensor:
    """Attends like `core` from this rank's tokens: `[s/c, b, g, r, d]`, `[s/c, b, g, d]` -> `[s/c, b, g * r * d]`."""
    axes = core.axes
    if axes.heads.size > 1:
        whole = trade_tokens_for_heads(torch.cat((q, k[:, :, :, None], v[:, :, :, None]), 3), axes.heads)
        q, k, v = whole[:, :, :, :-2], whole[:, :, :, -2], whole[:, :, :, -1]
        heads = q.shape[2] * q.shape[3]
        core = dataclasses.replace(core, first_head=core.first_head + axes.heads.rank * heads)
        sinks = None if sinks is None else sinks.narrow(0, axes.heads.rank * heads, heads)
    if axes.ring.size > 1:
        y = _over_ring(core, q, k, v, microbatch, sinks, training)
    else:
        y = core(q, k, v, sinks=sinks, training=training, **microbatch.of_attention)
    return trade_heads_for_tokens(y.view(*q.shape[:3], -1), axes.heads).flatten(2)


def _over_ring(
    core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, microbatch: Microbatch, sinks: Tensor | None, training: bool
) -> Tensor:
    ring, narrow = core.axes.ring, q.dtype
    assert microbatch.order is not None, "the micro-batch has not been cut"
    order, starts = microbatch.order, microbatch.document_starts
    on_cpu = q.device.type == "cpu"  # the kernels of a GPU have scores in fp32
    q, k, v = (x.to(core.tile_dtype(q) if on_cpu else core.product_dtype or q.dtype) for x in (q, k, v))
    drops = core.dropout > 0.0 and training
    need = Need(
        device=q.device,
        dtype=q.dtype,
        queries=len(q),
        keys=len(order),
        channels=q.shape[-1],
        hides=starts is not None or (core.window is not None and core.window < len(order)),
        bends=core.softcap is not None,  # sinks are joined to what the kernel gives
        drops=drops,
        rewrites=False,
        in_parts=True,
    )
    name = choose(need)
    assert name in (FLASH, FLEX, TILED), f"attention by {name}, which is not called here"
    drop = None
    if drops:
        drop = core.weight_dropout(microbatch.sample_ids, order.chunk(ring.size)[ring.rank], q, fused=name == FLEX)
    kernel = (FlexKernel if name == FLEX else TileKernel)(q.shape[2], drop, core.softcap)
    if name == TILED:
        q, k, v = (x.to(core.tile_dtype(q)) for x in (q, k, v))
    elif name == FLASH:
        kernel = FlashKernel(q.shape[2])
        order = sequence_order(len(order), ring.size)  # on the host, where its rectangles are computed
    places = order.chunk(ring.size)
    own = None if starts is None else starts.chunk(ring.size, 1)[ring.rank]
    logits = sinks_by_query(sinks, q)

    def sight(rank: int | None) -> Visibility:
        """Of the keys of one rank, or of all at rising positions: the same in all layers of this window."""

        def say() -> Visibility:
            keys = torch.arange(len(order), device=order.device) if rank is None else places[rank]
            return Visibility.of(places[ring.rank], keys, window=core.window, document_starts=own)

        return microbatch.shared.once((rank, core.window, order.device), say)

    if core.axes.gathers:
        return gathered_attention(q, k, v, sight(None), Gathering(microbatch.order, ring), kernel, logits).to(narrow)
    return ring_attention(q, k, v, sight, ring, kernel, logits).to(narrow)
