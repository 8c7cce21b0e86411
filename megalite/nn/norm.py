"""LayerNorm and RMSNorm (arXiv 1607.06450, 1910.07467); statistics in fp32 or wider, as the library computes them.

With `--apply-layernorm-1p` the factor is 1 + weight: the weight is kept as it is, since a narrow dtype has fewer digits
near 1 than near 0, and the sum is made in fp32 or wider.

Queries and keys are normalised head by head (Qwen3), or over all heads of a token (OLMoE, arXiv 2409.02060).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm import copy_to_axis, reduce_from_axis
from megalite.config import ModelConfig
from megalite.gradient import widened
from megalite.inventory import Parameter, norm, norm_start
from megalite.parallel.tensor import LayerContext, parameter_of, weight_and_bias


class Norm(nn.Module):
    """Normalises the last dimension, `[..., size]` -> `[..., size]` in the parameter dtype.

    split_input: each tensor-parallel rank sees other tokens or heads, so it computes a share of the weights' gradients.
    """

    def __init__(
        self, size: int, config: ModelConfig, ctx: LayerContext, *, split_input: bool, epsilon: float | None = None
    ) -> None:
        """epsilon: None: the model's."""
        super().__init__()
        self.size, self.epsilon = size, epsilon or config.norm_epsilon
        self.plus_one = config.apply_layernorm_1p
        self.weight, self.bias = weight_and_bias(norm("", size, config, "heads" if split_input else ""), ctx)

    def forward(self, x: Tensor) -> Tensor:
        bias, dtype = self.bias, self.weight.dtype
        weight: Tensor = self.weight
        if self.plus_one:
            x, weight = widened(x), 1.0 + widened(weight)
        elif x.dtype != dtype:
            weight = weight.to(x.dtype)
        if bias is None:
            return F.rms_norm(x, (self.size,), weight, self.epsilon).to(dtype)
        return F.layer_norm(x, (self.size,), weight, bias.to(weight.dtype), self.epsilon).to(dtype)


def head_norm(width: int, config: ModelConfig, ctx: LayerContext) -> nn.Module:
    """Makes the norm of queries or keys, which are `width` wide in all heads together."""
    if config.qk_layernorm_across_heads:
        return AcrossHeadsNorm(width, config, ctx)
    return Norm(config.head_dim, config, ctx, split_input=ctx.tp.size > 1)


class AcrossHeadsNorm(nn.Module):
    """RMSNorm over all heads of a token together, `[s, b, heads / t, ..., d]` -> the same.

    size: of all heads. A tensor-parallel rank has the weights of its heads; the sum of squares is the ranks' together.
    """

    def __init__(self, size: int, config: ModelConfig, ctx: LayerContext) -> None:
        super().__init__()
        self.size, self.epsilon, self.tp = size, config.norm_epsilon, ctx.tp
        self.plus_one = config.apply_layernorm_1p
        self.weight = parameter_of(Parameter("weight", (size,), 0, decay=False, init_value=norm_start(config)), ctx)

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2)
        if self.tp.size == 1 and not self.plus_one:
            return F.rms_norm(y, (self.size,), self.weight, self.epsilon).view(x.shape)
        wide = widened(y)
        squares = reduce_from_axis(wide.square().sum(-1, keepdim=True), self.tp)
        scale = torch.rsqrt(copy_to_axis(squares, self.tp) / self.size + self.epsilon)
        if self.plus_one:
            return (wide * scale * (1.0 + widened(self.weight))).to(y.dtype).view(x.shape)
        return ((wide * scale).to(y.dtype) * self.weight).view(x.shape)
