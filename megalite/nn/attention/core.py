"""Scaled dot-product attention of the heads on this rank, by one of several kernels with the same result (`choose`).

Which keys a query sees is a value that all of them read (`megalite.visibility`).

Queries are `[s, b, g, r, d]`: g groups (key/value heads) of r query heads; keys and values `[k, b, g, d]` with k >=
s: the queries are the last s of k tokens (k > s while generating from a cache).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm import ContextAxes
from megalite.config import ModelConfig
from megalite.inventory import learned_sinks
from megalite.nn.attention import masked
from megalite.nn.attention.blocked import blocked_attention
from megalite.nn.attention.by_sight import attention_by_sight
from megalite.nn.attention.choose import BLOCKED, FUSED, Need, choose
from megalite.nn.attention.tiles import WeightDropout
from megalite.nn.dropout import site_key
from megalite.parallel.tensor import LayerContext, parameter_of, product_dtype
from megalite.visibility import Documents, Shared


@dataclass(frozen=True)
class AttentionCore:
    """softmax(q k^T / sqrt(d)) v, causal.

    softmax_in_fp32: compute scores and softmax in fp32 or wider.
    recompute: keep nothing of size s x s, but recompute it in backward.
    dropout, key: probability of dropping an attention weight; key of the random numbers.
    first_head: logical number of this rank's first query head.
    product_dtype: dtype of the matrix products (None: that of q).
    window: a query sees itself and the `window - 1` keys before it (Mistral, arXiv 2310.06825).
    softcap: scores become c tanh(score / c) before masking (Gemma 2, arXiv 2408.00118).
    axes: the ranks that share a sequence; a call attends to the keys that it is given (`context_attention`: to all).
    """

    softmax_in_fp32: bool = False
    recompute: bool = False
    dropout: float = 0.0
    key: Tensor | None = None
    first_head: int = 0
    product_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    axes: ContextAxes = field(default_factory=ContextAxes)

    @classmethod
    def of(cls, config: ModelConfig, index: int, ctx: LayerContext) -> AttentionCore:
        """That of layer `index`."""
        return cls(
            window=config.window_size,
            softmax_in_fp32=config.attention_softmax_in_fp32,
            recompute=config.recompute_granularity == "selective",
            dropout=config.attention_dropout,
            key=site_key(ctx.seed, "layers", index, "attention"),
            product_dtype=product_dtype(ctx.dtype, torch.device(ctx.device).type),
            first_head=ctx.tp.rank * (config.num_attention_heads // ctx.tp.size),
            softcap=config.attn_logit_softcapping,
            axes=ctx.cp,
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        packed: Tensor | None = None,
        values: int | None = None,
        sinks: Tensor | None = None,
        document_starts: Tensor | None = None,
        documents: Documents | None = None,
        sample_ids: Tensor | None = None,
        shared: Shared | None = None,
        training: bool = False,
    ) -> Tensor:
        """q `[s, b, g, r, d]`, k, v `[k, b, g, d]` -> `[s, b, g * r * d]`.

        packed: q, k and v as one tensor `[s, b, g, r + 2, d]`, if it exists (saves a concatenation).
        values: channels of v that are no padding; a kernel that can leaves out the others: `[s, b, g * r * values]`.
        sinks: a logit `[g * r]` of each head that joins its softmax and has no value (gpt-oss, arXiv 2508.10925).
        document_starts: int64 `[b, s]`; attention sees nothing before them. documents: the same, if the host knows.
        sample_ids: int64 `[b]`, needed for dropout in training. shared: of the micro-batch.
        """
        narrow, wide = q.dtype, self.product_dtype or q.dtype
        drops = self.dropout > 0.0 and training
        window = self.window if self.window is not None and self.window < len(k) else None
        name = choose(
            Need(
                device=q.device,
                dtype=wide,
                queries=len(q),
                keys=len(k),
                channels=q.shape[-1],
                hides=window is not None or document_starts is not None,
                bends=self.softcap is not None or sinks is not None,
                drops=drops,
                # on CUDA the fused kernels compute fp32 scores, and so does a widened product
                rewrites=self.softmax_in_fp32 and wide.itemsize < 4 and q.device.type == "cpu",
                keeps_weights=not self.recompute,
            )
        )
        if name == BLOCKED:
            packed = torch.cat((q, k[:, :, :, None], v[:, :, :, None]), 3) if packed is None else packed
            return blocked_attention(packed.to(wide), values).to(narrow)
        if name == FUSED:
            return fused_attention(q.to(wide), k.to(wide), v.to(wide)).to(narrow)
        assert sample_ids is not None or not drops, "attention dropout needs the samples' numbers"
        dropped = sample_ids if drops else None
        seen: dict[str, Any] = {"window": window, "document_starts": document_starts, "documents": documents}
        y: Tensor = attention_by_sight(self, name, q, k, v, sinks=sinks, dropped=dropped, shared=shared, **seen)
        return y.to(narrow)

    def tile_dtype(self, q: Tensor) -> torch.dtype:
        """The dtype of the tiles' GEMMs: the scores have that of the operands."""
        wide = self.product_dtype or q.dtype
        return torch.float32 if self.softmax_in_fp32 and wide.itemsize < 4 else wide

    def weight_dropout(self, sample_ids: Tensor, queries: Tensor, q: Tensor, *, fused: bool) -> WeightDropout:
        """Of queries at these positions, `[s, b, g, r, d]`. fused: by a compiled kernel."""
        assert self.key is not None
        words_of = masked.compiled(masked.words_of) if fused else masked.words_of
        words = words_of(self.key, sample_ids, queries, q.shape[2], q.shape[3], self.first_head)
        return WeightDropout(self.dropout, words)


def new_sinks(config: ModelConfig, ctx: LayerContext) -> nn.Parameter | None:
    """The learned sinks of this rank's heads, where a layer has any."""
    return next((parameter_of(each, ctx) for each in learned_sinks(config)), None)


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`F.scaled_dot_product_attention`, causal, for the whole sequence or its last token; shapes of `AttentionCore`."""
    s, b, g, r, d = q.shape
    length = k.shape[0]
    grouped = r > 1
    q = q.permute(1, 2, 3, 0, 4).reshape(b, g * r, s, d)
    k, v = (t.permute(1, 2, 0, 3) for t in (k, v))
    # the CPU's kernel, and that of a GPU for 32 bits, want as many key heads as query heads
    if grouped and (q.device.type == "cpu" or q.dtype.itemsize > 2):
        k, v = (t[:, :, None].expand(b, g, r, length, d).reshape(b, g * r, length, d) for t in (k, v))
        grouped = False
    context = F.scaled_dot_product_attention(q, k, v, is_causal=s == length, enable_gqa=grouped)
    return context.permute(2, 0, 1, 3).reshape(s, b, g * r * d)
