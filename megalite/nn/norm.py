"""LayerNorm and RMSNorm (arXiv 1607.06450, 1910.07467); statistics in fp32 or wider, as the library computes them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.inventory import NO_AXES, ParameterPlacement
from megalite.parallel.tensor import LayerContext, new_parameter


class Norm(nn.Module):
    """Normalises the last dimension, `[..., size]` -> `[..., size]` in the parameter dtype.

    split_input: each tensor-parallel rank sees other tokens or heads, so it computes a share of the weights' gradients.
    """

    def __init__(self, size: int, config: ModelConfig, ctx: LayerContext, *, split_input: bool) -> None:
        super().__init__()
        self.size, self.epsilon = size, config.norm_epsilon
        partial = ctx.tp.names if split_input else NO_AXES
        place = ParameterPlacement((size,), (0,), partial=partial, decay=False, init_value=1.0)
        self.weight = new_parameter((size,), place, ctx)
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            place = ParameterPlacement((size,), (0,), partial=partial, decay=False)
            self.bias = new_parameter((size,), place, ctx)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if x.dtype == weight.dtype:
            if bias is None:
                return F.rms_norm(x, (self.size,), weight, self.epsilon)
            return F.layer_norm(x, (self.size,), weight, bias, self.epsilon)
        if bias is None:
            return F.rms_norm(x, (self.size,), weight.to(x.dtype), self.epsilon).to(weight.dtype)
        return F.layer_norm(x, (self.size,), weight.to(x.dtype), bias.to(x.dtype), self.epsilon).to(weight.dtype)
