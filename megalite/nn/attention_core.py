"""Scaled dot-product attention of the heads on this rank, in one of three ways with the same result.

fused     `F.scaled_dot_product_attention`: flash attention on CUDA, a blocked kernel on CPU; nothing of size s x s is
          stored.
blocked   `nn.attention_blocked`: products over blocks of queries, for sequences of up to 1,024 tokens on CPU.
plain     products and a softmax: for dropout of attention weights (the library's kernels have no key), and for scores
          in fp32 on request.

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
from megalite.nn.dropout import combine, keyed_dropout


@dataclass(frozen=True)
class AttentionCore:
    """softmax(q k^T / sqrt(d)) v, causal.

    softmax_in_fp32: scores and softmax in fp32 or wider. recompute: keep nothing of size s x s, compute it again in
    backward. dropout, seed, layer: keyed dropout of attention weights; first_head: logical number of this rank's
    first query head. window: a query sees itself and the `window - 1` keys before it (Mistral, arXiv 2310.06825).
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
        document_ids: Tensor | None = None,
        sample_ids: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        """q `[s, b, g, r, d]`, k, v `[k, b, g, d]` -> `[s, b, g * r * d]`.

        packed: q, k and v as one `[s, b, g, r + 2, d]`, where they already are (saves putting them together).
        document_ids: int64 `[b, k]`, attention stays within equal ids. sample_ids: int64 `[b]`, needed by dropout in
        training.
        """
        narrow, wide = q.dtype, self.product_dtype or q.dtype
        drop = self.dropout if training else 0.0
        window = self.window if self.window is not None and self.window < k.shape[0] else None
        if window is None and self._prefers_blocked(q, k, document_ids, drop):
            packed = torch.cat((q, k[:, :, :, None], v[:, :, :, None]), 3) if packed is None else packed
            return blocked_attention(packed.to(wide)).to(narrow)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
        if drop == 0.0 and not self._wants_fp32(q) and not _compiler_narrows(q):
            return fused_attention(q, k, v, document_ids, window).to(narrow)
        inputs = (q, k, v, document_ids, sample_ids, drop, window)
        if self.recompute and torch.is_grad_enabled():
            y: Tensor = checkpoint(self._plain, *inputs, use_reentrant=False, preserve_rng_state=False)
            return y.to(narrow)
        return self._plain(*inputs).to(narrow)

    def _prefers_blocked(self, q: Tensor, k: Tensor, document_ids: Tensor | None, drop: float) -> bool:
        s, length = q.shape[0], k.shape[0]
        plain = q.device.type == "cpu" and document_ids is None and drop == 0.0 and not self._wants_fp32(q)
        suits = s == length and BLOCKED_FROM <= s <= BLOCKED_UP_TO
        return plain and suits and not self.recompute

    def _wants_fp32(self, q: Tensor) -> bool:
        """Whether fp32 scores have to be asked for: the fused kernels keep them on CUDA, and so does a widened
        product.
        """
        narrow = (self.product_dtype or q.dtype).itemsize < 4
        return self.softmax_in_fp32 and narrow and q.device.type == "cpu"

    def _plain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        document_ids: Tensor | None,
        sample_ids: Tensor | None,
        drop: float,
        window: int | None = None,
    ) -> Tensor:
        s, b, g, r, d = q.shape
        length = k.shape[0]
        q = (q * d**-0.5).permute(1, 2, 3, 0, 4).reshape(b * g, r * s, d)
        k, v = (t.permute(1, 2, 0, 3).reshape(b * g, length, d) for t in (k, v))
        if self.softmax_in_fp32:
            exact = torch.promote_types(q.dtype, torch.float32)
            q, k = q.to(exact), k.to(exact)
        scores = torch.bmm(q, k.transpose(1, 2)).view(b, g, r, s, length)
        allowed = attention_mask(s, length, document_ids, q.device, window)
        scores = scores + torch.zeros((), dtype=scores.dtype, device=q.device).where(allowed, float("-inf"))
        weights = torch.softmax(scores, -1).to(v.dtype)
        if drop > 0.0:
            assert sample_ids is not None, "attention dropout needs the samples' numbers"
            weights = self._drop(weights, drop, sample_ids)
        context = torch.bmm(weights.view(b * g, r * s, length), v).view(b, g, r, s, d)
        return context.permute(3, 0, 1, 2, 4).reshape(s, b, g * r * d)

    def _drop(self, weights: Tensor, p: float, sample_ids: Tensor) -> Tensor:
        """weights `[b, g, r, s, k]`; keyed by sample, head, query and key."""
        b, g, r, s, length = weights.shape
        assert self.key is not None
        device = weights.device
        keys = combine(self.key, sample_ids)[:, None]
        heads = torch.arange(self.first_head, self.first_head + g * r, device=device)
        keys = combine(0, keys ^ combine(1, heads)[None])[..., None]
        keys = combine(2, keys ^ combine(3, torch.arange(length - s, length, device=device)))
        return keyed_dropout(weights, p, keys.view(b, g, r, s), torch.arange(length, device=device))


def _compiler_narrows(q: Tensor) -> bool:
    """Before torch 2.13 the compiler took the CPU kernel's log-sums for fp32 in fp64 too, and its backward failed."""
    compiled = torch.compiler.is_compiling() and q.dtype == torch.float64 and q.device.type == "cpu"
    return compiled and torch.__version__ < "2.13"  # compared as versions


def attention_mask(
    s: int, length: int, document_ids: Tensor | None, device: torch.device, window: int | None = None
) -> Tensor:
    """True where query i of the last s tokens may look at key j: `[s, k]`, or `[b, 1, 1, s, k]` with documents `[b,
    k]`.
    """
    allowed = torch.ones(s, length, dtype=torch.bool, device=device).tril(length - s)
    if window is not None:
        allowed = allowed.triu(length - s - window + 1)
    if document_ids is None:
        return allowed
    same = document_ids[:, -s:, None] == document_ids[:, None, :]
    return (same & allowed)[:, None, None]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None, window: int | None = None) -> Tensor:
    """The library's kernel; shapes as `AttentionCore.__call__`."""
    s, b, g, r, d = q.shape
    length = k.shape[0]
    grouped = r > 1
    q = q.permute(1, 2, 3, 0, 4).reshape(b, g * r, s, d)
    k, v = (t.permute(1, 2, 0, 3) for t in (k, v))
    if grouped and q.device.type == "cpu":  # the CPU kernel wants as many key heads as query heads
        k, v = (t[:, :, None].expand(b, g, r, length, d).reshape(b, g * r, length, d) for t in (k, v))
        grouped = False
    if document_ids is None and window is None and s == length:
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    elif document_ids is None and window is None and s == 1:
        context = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    else:
        mask = attention_mask(s, length, document_ids, q.device, window)
        mask = mask if document_ids is None else mask[:, 0]
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return context.permute(2, 0, 1, 3).reshape(s, b, g * r * d)
