"""Low-rank adapters of experts (LoRA, arXiv 2106.09685): y_e += scale * (x_e A_e^T) B_e^T for the rows of each expert.

    own pairs   A `[E, R, in]`, B `[E, ..., out, R]`, dealt out as the experts are
    shared A    A `[1, R, in]` on every rank (HydraLoRA, arXiv 2404.19245); each rank of `ep` computes a share of dA

The products are those of the experts themselves (`parallel.expert.GroupedProduct`), so weight gradients are postponed
and summed as theirs are. What is kept for backward is x A^T, `[rows, R]`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.inventory import Adapter, adapters_of
from megalite.nn.experts import MoE
from megalite.nn.further_adapters import Bottlenecks
from megalite.parallel.expert import ElementwiseFunction, RowCounts
from megalite.parallel.tensor import LayerContext, LowRank, add_adapters


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
        block.adapters = Bottlenecks(config, ctx)
    add_adapters(block, config, ctx)
    linears = {"fc1": mlp.experts.fc1, "fc2": mlp.experts.fc2} if isinstance(mlp, MoE) else {}
    for name, linear in linears.items():
        for adapter in adapters_of(config, f"mlp.experts.{name}"):
            linear.adapters = ExpertAdapters(config, adapter, linear.product, ctx)
            linear.product = linear.adapters.forward
