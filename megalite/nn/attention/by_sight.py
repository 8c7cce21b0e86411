"""Attention that has to know who sees whom, or which weights are dropped: by a kernel of `masked.py`, or by tiles.

Who sees whom is the same in all layers of a micro-batch that have the same window, forward and in recomputation: the
first of them says it, and what a kernel makes of it (blocks, where sequences begin) is made once, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.nn.attention.choose import TILED
from megalite.nn.attention.masked import FLEX, MASKED
from megalite.nn.attention.tiles import tiled_attention
from megalite.nn.uncompiled import Uncompiled
from megalite.visibility import Documents, Shared, Visibility

if TYPE_CHECKING:
    from megalite.nn.attention.core import AttentionCore


@Uncompiled
def attention_by_sight(
    core: AttentionCore,
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None,
    sinks: Tensor | None,
    document_starts: Tensor | None,
    documents: Documents | None,
    dropped: Tensor | None,
    shared: Shared | None,
) -> Tensor:
    """As `core`, by the kernel of this name; shapes of `AttentionCore`. dropped: numbers of the samples, `[b]`, whose
    weights are dropped; None: nothing is."""

    def say() -> Visibility:
        places, at = torch.arange(len(k), device=k.device), len(k) - len(q)  # the queries are the last tokens
        return Visibility.of(
            places[at:], places, window=window, document_starts=document_starts, documents=documents, at=at
        )

    sight = say() if shared is None else shared.once((len(q), len(k), window), say)
    drop = None if dropped is None else core.weight_dropout(dropped, sight.queries, q, fused=name == FLEX)
    if name in MASKED:
        dtype = core.product_dtype or q.dtype
        more = {"softcap": core.softcap, "sinks": sinks, "drop": drop} if name == FLEX else {}
        return MASKED[name](q.to(dtype), k.to(dtype), v.to(dtype), sight, **more)
    assert name == TILED, f"attention by {name}, which is not called here"
    q, k, v = (x.to(core.tile_dtype(q)) for x in (q, k, v))
    y: Tensor = tiled_attention(q, k, v, sight, drop, softcap=core.softcap, sinks=sinks)
    return y
