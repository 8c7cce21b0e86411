"""Plain causal attention by `F.scaled_dot_product_attention`: flash attention on CUDA, a blocked kernel on CPU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


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
