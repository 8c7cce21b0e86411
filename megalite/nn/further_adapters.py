"""Adapters that are layers of their own, trained beside a frozen model.

bottleneck   y + up(gelu(down(y))) behind attention and behind the MLP, in front of the residual sum (Houlsby et al.,
             arXiv 1902.00751); up is zero at first. Each tensor-parallel rank has both whole, for the tokens that it
             has whole.
prefix       learned keys and values in front of those of each text (Li and Liang, arXiv 2101.00190), of this rank's
             heads. They are not rotated; the text's positions begin behind them, as `peft` has it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.inventory import Parameter, bottlenecks, prefixes
from megalite.nn.kv_cache import LayerCache
from megalite.parallel.tensor import LayerContext, parameter_of, product_dtype


class Dense(nn.Module):
    """One of the two layers of a bottleneck, `[..., in]` -> `[..., out]`."""

    def __init__(self, parameters: tuple[Parameter, Parameter], ctx: LayerContext) -> None:
        super().__init__()
        self.weight, self.bias = (parameter_of(each, ctx) for each in parameters)
        self.dtype = product_dtype(ctx.dtype, torch.device(ctx.device).type)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(self.dtype), self.bias.to(self.dtype)
        return F.linear(x.to(self.dtype), weight, bias).to(x.dtype)


class Bottleneck(nn.Module):
    """y + up(gelu(down(y))) behind a half of a block."""

    def __init__(self, parameters: list[Parameter], ctx: LayerContext) -> None:
        super().__init__()
        a, b, c, d = parameters
        self.down, self.up = Dense((a, b), ctx), Dense((c, d), ctx)

    @property
    def layers(self) -> tuple[Dense, Dense]:
        return self.down, self.up

    def forward(self, y: Tensor) -> Tensor:
        up: Tensor = self.up(F.gelu(self.down(y)))
        return y + up


class Bottlenecks(nn.Module):
    """Both of a block."""

    def __init__(self, config: ModelConfig, ctx: LayerContext) -> None:
        super().__init__()
        parameters = list(bottlenecks(config))
        self.attention, self.mlp = Bottleneck(parameters[:4], ctx), Bottleneck(parameters[4:], ctx)


class Prefix(nn.Module):
    """Keys and values in front of the text, `[2, P, g/t * d]`."""

    def __init__(self, config: ModelConfig, ctx: LayerContext) -> None:
        super().__init__()
        self.prefix = parameter_of(prefixes(config)[0], ctx)

    def forward(self, k: Tensor, v: Tensor, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the text `[s, b, g/t, d]`, with these in front; in generation the cache has them."""
        own = [part.view(-1, 1, *k.shape[2:]).expand(-1, *k.shape[1:]) for part in self.prefix]
        if cache is None:
            return torch.cat((own[0], k)), torch.cat((own[1], v))
        if cache.length == 0:
            cache.begin(*own)
        return k, v
