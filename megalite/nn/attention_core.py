"""Scaled dot-product attention of the heads on this rank, computed in one of several ways with the same result.

    fused     `F.scaled_dot_product_attention`: flash attention on CUDA, a blocked kernel on CPU; stores nothing of size
              s x s
    blocked   `nn.attention_blocked`: products over blocks of queries, for sequences of up to 1,024 tokens on CPU
    tiled     `nn.attention_tiles`: packed documents and sliding windows on CPU; skips masked tiles
    device    `nn.attention_device`: the same on a GPU, by the library's kernels
    plain     products and a softmax: for dropout of attention weights (the library's kernels have no key), and for
              scores in fp32 on request

Which keys a query sees is a value that all of them read (`megalite.visibility`).

Queries are `[s, b, g, r, d]`: g groups (key/value heads) of r query heads; keys and values `[k, b, g, d]` with k >=
s: the queries are the last s of k tokens (k > s while generating from a cache).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalite.inventory import BLOCKED_FROM, BLOCKED_UP_TO
from megalite.nn.attention_blocked import blocked_attention
from megalite.nn.attention_device import device_attention
from megalite.nn.attention_tiles import tiled_attention
from megalite.nn.dropout import combine, keyed_dropout
from megalite.visibility import Visibility


@dataclass(frozen=True)
class AttentionCore:
    """softmax(q k^T / sqrt(d)) v, causal.

    softmax_in_fp32: compute scores and softmax in fp32 or wider.
    recompute: keep nothing of size s x s; compute it again in backward.
    dropout, key: probability and key of the dropout of attention weights.
    first_head: logical number of this rank's first query head.
    product_dtype: dtype of the matrix products (None: that of q).
    window: a query sees itself and the `window - 1` keys before it (Mistral, arXiv 2310.06825).
    """

    softmax_in_fp32: bool = False
    recompute: bool = False
    dropout: float = 0.0
    key: Tensor | None = None
    first_head: int = 0
    product_dtype: torch.dtype | None = None
    window: int | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        packed: Tensor | None = None,
        document_starts: Tensor | None = None,
        sample_ids: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        """q `[s, b, g, r, d]`, k, v `[k, b, g, d]` -> `[s, b, g * r * d]`.

        packed: q, k and v as one tensor `[s, b, g, r + 2, d]`, if it exists (saves a concatenation).
        document_starts: int64 `[b, s]`; attention sees nothing before them.
        sample_ids: int64 `[b]`, needed for dropout in training.
        """
        narrow, wide = q.dtype, self.product_dtype or q.dtype
        drop = self.dropout if training else 0.0
        window = self.window if self.window is not None and self.window < k.shape[0] else None
        whole = window is None and document_starts is None
        exact = drop > 0.0 or self._wants_fp32(q)
        if whole and not exact and self._prefers_blocked(q, k):
            packed = torch.cat((q, k[:, :, :, None], v[:, :, :, None]), 3) if packed is None else packed
            return blocked_attention(packed.to(wide)).to(narrow)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
        if whole and not exact and not _compiler_narrows(q) and len(q) in (1, len(k)):
            return fused_attention(q, k, v).to(narrow)
        keys = torch.arange(len(k), device=k.device)
        sight = Visibility.of(keys[-len(q) :], keys, window=window, document_starts=document_starts)
        if not exact:
            y: Tensor = (tiled_attention if q.device.type == "cpu" else device_attention)(q, k, v, sight)
            return y.to(narrow)
        inputs = (q, k, v, sight, sample_ids, drop)
        if self.recompute and torch.is_grad_enabled():
            y = checkpoint(self._plain, *inputs, use_reentrant=False, preserve_rng_state=False)
            return y.to(narrow)
        return self._plain(*inputs).to(narrow)

    def _prefers_blocked(self, q: Tensor, k: Tensor) -> bool:
        s, length = q.shape[0], k.shape[0]
        suits = s == length and BLOCKED_FROM <= s <= BLOCKED_UP_TO
        return q.device.type == "cpu" and suits and not self.recompute

    def _wants_fp32(self, q: Tensor) -> bool:
        """Whether fp32 scores need extra work: on CUDA the fused kernels compute them, and so does a widened
        product."""

        narrow = (self.product_dtype or q.dtype).itemsize < 4
        return self.softmax_in_fp32 and narrow and q.device.type == "cpu"

    def operand_dtype(self, q: Tensor) -> torch.dtype:
        """The dtype in which tiles are multiplied."""
        return torch.float32 if self._wants_fp32(q) else self.product_dtype or q.dtype

    def _plain(
        self, q: Tensor, k: Tensor, v: Tensor, sight: Visibility, sample_ids: Tensor | None, drop: float
    ) -> Tensor:
        s, b, g, r, d = q.shape
        length = k.shape[0]
        q = (q * d**-0.5).permute(1, 2, 3, 0, 4).reshape(b * g, r * s, d)
        k, v = (t.permute(1, 2, 0, 3).reshape(b * g, length, d) for t in (k, v))
        if self.softmax_in_fp32:
            exact = torch.promote_types(q.dtype, torch.float32)
            q, k = q.to(exact), k.to(exact)
        scores = torch.bmm(q, k.transpose(1, 2)).view(b, g, r, s, length)
        allowed = sight.dense()
        allowed = allowed if allowed.dim() == 2 else allowed[:, None, None]
        scores = scores + torch.zeros((), dtype=scores.dtype, device=q.device).where(allowed, float("-inf"))
        weights = torch.softmax(scores, -1).to(v.dtype)
        if drop > 0.0:
            assert sample_ids is not None, "attention dropout needs the samples' numbers"
            weights = self._drop(weights, drop, sample_ids, sight.queries)
        context = torch.bmm(weights.view(b * g, r * s, length), v).view(b, g, r, s, d)
        return context.permute(3, 0, 1, 2, 4).reshape(s, b, g * r * d)

    def _drop(self, weights: Tensor, p: float, sample_ids: Tensor, queries: Tensor) -> Tensor:
        """weights `[b, g, r, s, k]`; keyed by sample, head, query and key."""
        b, g, r, s, length = weights.shape
        words = self.words(sample_ids, queries, g, r).view(b, g, s, r).transpose(2, 3).contiguous()
        return keyed_dropout(weights, p, words, torch.arange(length, device=weights.device))

    def words(self, sample_ids: Tensor, queries: Tensor, g: int, r: int) -> Tensor:
        """What keys the dropout of the weights of queries at these positions, `[b * g, s * r]`."""
        assert self.key is not None
        heads = torch.arange(self.first_head, self.first_head + g * r, device=queries.device)
        keys = combine(0, combine(self.key, sample_ids)[:, None] ^ combine(1, heads)[None])
        keys = combine(2, keys[..., None] ^ combine(3, queries))  # [b, g * r, s]
        return keys.view(len(sample_ids) * g, r, -1).transpose(1, 2).flatten(1)


def _compiler_narrows(q: Tensor) -> bool:
    """Before torch 2.13 the compiler took the CPU kernel's log-sums for fp32 in fp64 too, and its backward failed."""
    compiled = torch.compiler.is_compiling() and q.dtype == torch.float64 and q.device.type == "cpu"
    return compiled and torch.__version__ < "2.13"  # compared as versions


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The library's kernel, causal, for the whole sequence or its last token; shapes as `AttentionCore.__call__`."""
    s, b, g, r, d = q.shape
    length = k.shape[0]
    grouped = r > 1
    q = q.permute(1, 2, 3, 0, 4).reshape(b, g * r, s, d)
    k, v = (t.permute(1, 2, 0, 3) for t in (k, v))
    if grouped and q.device.type == "cpu":  # the CPU kernel wants as many key heads as query heads
        k, v = (t[:, :, None].expand(b, g, r, length, d).reshape(b, g * r, length, d) for t in (k, v))
        grouped = False
    context = F.scaled_dot_product_attention(q, k, v, is_causal=s == length, enable_gqa=grouped)
    return context.permute(2, 0, 1, 3).reshape(s, b, g * r * d)
