"""Norms of queries and keys: of each head (Qwen3), or over all heads of a token (OLMoE, arXiv 2409.02060)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm import copy_to_axis, reduce_from_axis
from megalite.config import ModelConfig
from megalite.inventory import ParameterPlacement
from megalite.nn.norm import Norm
from megalite.parallel.tensor import LayerContext, new_parameter


def head_norm(width: int, config: ModelConfig, ctx: LayerContext) -> nn.Module:
    """Of queries or keys, `width` wide in all heads together."""
    if config.qk_layernorm_across_heads:
        return AcrossHeadsNorm(width, config, ctx)
    return Norm(config.head_dim, config, ctx, split_input=ctx.tp.size > 1)


class AcrossHeadsNorm(nn.Module):
    """RMSNorm over all heads of a token together, `[s, b, heads / t, ..., d]` -> the same (OLMoE, arXiv 2409.02060).

    size: of all heads. A tensor-parallel rank has the weights of its heads; the sum of squares is the ranks' together.
    """

    def __init__(self, size: int, config: ModelConfig, ctx: LayerContext) -> None:
        super().__init__()
        self.size, self.epsilon, self.tp = size, config.norm_epsilon, ctx.tp
        here = size // ctx.tp.size
        place = ParameterPlacement((size,), (ctx.tp.rank * here,), ctx.tp.names, decay=False, init_value=1.0)
        self.weight = new_parameter((here,), place, ctx)

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2)
        if self.tp.size == 1:
            return F.rms_norm(y, (self.size,), self.weight, self.epsilon).view(x.shape)
        wide = y if y.dtype == torch.float64 else y.float()
        squares = reduce_from_axis(wide.square().sum(-1, keepdim=True), self.tp)
        scale = torch.rsqrt(copy_to_axis(squares, self.tp) / self.size + self.epsilon)
        return ((wide * scale).to(y.dtype) * self.weight).view(x.shape)
