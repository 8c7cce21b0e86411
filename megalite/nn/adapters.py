"""Adapters beside a frozen model that are no part of a linear layer of `parallel.tensor`.

bottleneck   y + up(gelu(down(y))) behind attention and behind the MLP, in front of the residual sum (Houlsby et al.,
             arXiv 1902.00751); up is zero at first. Each tensor-parallel rank has both whole, for the tokens that it
             has whole.
prefix       learned keys and values in front of those of each text (Li and Liang, arXiv 2101.00190), of this rank's
             heads. They are not rotated; the text's positions begin behind them, as `peft` has it.

Of experts, low-rank (LoRA, arXiv 2106.09685): y_e += scale * (x_e A_e^T) B_e^T for the rows of each expert.

    own pairs   A `[E, R, in]`, B `[E, ..., out, R]`, dealt out as the experts are
    shared A    A `[1, R, in]` on every rank (HydraLoRA, arXiv 2404.19245); each rank of `ep` computes a share of dA

The products are those of the experts themselves (`parallel.expert.GroupedProduct`), so weight gradients are postponed
and summed as theirs are. What is kept for backward is x A^T, `[rows, R]`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.inventory import Adapter, Parameter, adapters_of, bottlenecks, prefixes
from megalite.nn.experts import MoE
from megalite.nn.kv_cache import LayerCache
from megalite.parallel.expert import ElementwiseFunction, RowCounts
from megalite.parallel.tensor import LayerContext, LowRank, add_adapters, parameter_of, product_dtype


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

    def forward(self, y: Tensor) -> Tensor:
        up: Tensor = self.up(F.gelu(self.down(y)))
        return y + up


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


class ExpertAdapters(nn.Module):
    """A linear layer of experts with its adapters: what takes the place of its product."""

    def __init__(
        self, config: ModelConfig, adapter: Adapter, product: Callable[..., Tensor], ctx: LayerContext
    ) -> None:
        super().__init__()
        self.pair, self.product, self.scale = [LowRank(adapter, ctx)], product, config.lora.scale
        self.add_module(adapter.name, *self.pair)
        self.shared = config.lora.lora_shared_a

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        counts: RowCounts,
        activation: ElementwiseFunction | None = None,
    ) -> Tensor:
        (pair,) = self.pair
        y = self.product(x, weight, bias, counts, activation)
        low = self.product(x, pair.lora_a, None, counts.together if self.shared else counts, activation)
        return torch.add(y, self.product(low, pair.lora_b, None, counts), alpha=self.scale)


def adapt(block: nn.Module, mlp: nn.Module, config: ModelConfig, ctx: LayerContext) -> None:
    """Gives a block, its linear layers and those of its experts the adapters that the configuration names."""
    if "bottleneck" in config.adapted_parts:
        own = list(bottlenecks(config))
        block.adapters = nn.ModuleDict({"attention": Bottleneck(own[:4], ctx), "mlp": Bottleneck(own[4:], ctx)})
    add_adapters(block, config, ctx)
    linears = {"fc1": mlp.experts.fc1, "fc2": mlp.experts.fc2} if isinstance(mlp, MoE) else {}
    for name, linear in linears.items():
        for adapter in adapters_of(config, f"mlp.experts.{name}"):
            linear.adapters = ExpertAdapters(config, adapter, linear.product, ctx)
            linear.product = linear.adapters.forward
