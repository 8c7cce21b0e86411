"""Low-rank adapters beside a frozen matrix (LoRA, arXiv 2106.09685): y += scale * (x A^T) B^T.

    column parallel   A `[R, in]` whole on every rank, B `[out/t, R]`      dA: each rank computes a share
    row parallel      A `[R, in/t]`, B `[out, R]` whole on every rank      dB: each rank computes a share

No message is added: what a rank computes of y, and of dx, joins the sum that the layer makes anyway, and shares of
gradients are summed with those of norms, after the reduction. As in the layers themselves, gradients of weights go to
the parameters' sinks, at once or when the schedule says so. What is kept for backward is x A^T, `[tokens, R]`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.gradient import sink_of
from megalite.inventory import Adapter, adapters_of
from megalite.parallel.tensor.context import LayerContext, parameter_of
from megalite.parallel.tensor.products import Products, product_dtype


class LowRank(nn.Module):
    """The two matrices of one adapter on this rank."""

    def __init__(self, adapter: Adapter, ctx: LayerContext) -> None:
        super().__init__()
        self.adapter = adapter
        self.lora_a, self.lora_b = (parameter_of(each, ctx) for each in (adapter.a, adapter.b))

    def rows(self, y: Tensor) -> Tensor:
        """Outputs that it adds to, as a view, `[tokens, out]` -> `[tokens, n, units, width]`."""
        its = self.adapter
        width = its.width or y.shape[-1] // its.units
        return y.view(-1, y.shape[-1] // (its.units * width), its.units, width)[:, :, its.begin : its.end]


class Adapters(nn.Module):
    """The adapters of one linear layer. A layer without any has None in their place."""

    def __init__(self, config: ModelConfig, adapters: Sequence[Adapter], ctx: LayerContext) -> None:
        super().__init__()
        for adapter in adapters:
            self.add_module(adapter.name, LowRank(adapter, ctx))
        self.scale, self.weight_grads = config.lora.scale, ctx.weight_grads
        self.products = Products(product_dtype(ctx.dtype, torch.device(ctx.device).type))

    def __len__(self) -> int:
        return len(self._modules)

    def each(self) -> list[LowRank]:
        return [module for module in self.children() if isinstance(module, LowRank)]

    def weights(self) -> list[nn.Parameter]:
        """A and B of one after the other."""
        return list(self.parameters())

    def add_to(self, y: Tensor, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """Adds to y, in place, what they compute of x; returns scale * x A^T of each."""
        kept = []
        for module, a, b in zip(self.each(), weights[::2], weights[1::2], strict=True):
            hidden = self.products.forward(x, a, None)[0].mul_(self.scale)
            rows = module.rows(y)
            rows.add_(self.products.forward(hidden, b, None)[0].view(rows.shape))
            kept.append(hidden)
        return kept

    def backward(
        self, dy: Tensor, saved: Sequence[Tensor], dx: Tensor | None
    ) -> Callable[[Tensor], list[Tensor | None]]:
        """Adds their part of the gradient of x to dx, in place. saved: the weights, and what `add_to` returned.

        Returns what computes dA and dB of each from x: added to the sinks (then None), or for autograd."""
        dy = dy.reshape(-1, dy.shape[-1])
        number = len(self)
        weights, hidden = saved[: 2 * number], saved[2 * number :]
        factors = []  # of the gradients of A and B, each the left one and the right one, which for A is x
        for module, a, b, kept in zip(self.each(), weights[::2], weights[1::2], hidden, strict=True):
            own = module.rows(dy).flatten(1)
            inner = self.products.input_gradient(own, b, None).mul_(self.scale)
            if dx is not None:
                dx += self.products.input_gradient(inner, a, None).view(dx.shape)
            factors += [(a, inner, None), (b, own, kept.detach().flatten(0, -2))]

        def of_weights(x: Tensor) -> list[Tensor | None]:
            x = x.detach().reshape(-1, x.shape[-1])
            return [self._gradient(weight, rows, x if right is None else right) for weight, rows, right in factors]

        return of_weights

    def _gradient(self, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor | None:
        return self.weight_grads.give(
            sink_of(weight),
            lambda sink: self.products.add_weight_gradient(sink, rows, columns, None),
            lambda: self.products.weight_gradient(rows, columns, weight, None),
        )


def add_adapters(block: nn.Module, config: ModelConfig, ctx: LayerContext) -> None:
    """Gives the linear layers of a block the adapters that the configuration names."""
    for linear, layer in block.named_modules():
        if isinstance(getattr(layer, "products", None), Products) and (adapters := adapters_of(config, linear)):
            layer.adapters = Adapters(config, adapters, ctx)
