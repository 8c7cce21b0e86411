"""Products in float8 as their definition says it, for one process: what `parallel.tensor.float8` must equal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.config import Float8
from megalite.gradient import GradSink

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class PlainFloat8:
    """Takes the place of a layer's `products`."""

    def __init__(self, given: Float8) -> None:
        self.recipe, narrow = given.fp8_recipe, torch.float8_e5m2
        self.gradients = narrow if given.fp8_format == "hybrid" else torch.float8_e4m3fn

    @classmethod
    def replace(cls, model: nn.Module, given: Float8) -> None:
        """In all layers of the model."""
        for module in model.modules():
            if given.fp8_format is not None and hasattr(module, "products"):
                module.products = cls(given)  # type: ignore[assignment]  # in its place

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
        matrix = self.weight(weight.reshape(-1, weight.shape[-1]))
        y = self.rows(x.reshape(-1, x.shape[-1])) @ matrix.T
        y = y if bias is None else y + bias.reshape(-1)
        return y.reshape(*x.shape[:-1], -1).to(x.dtype), None

    def begin_backward(self, dy: Tensor, weight: Tensor, kept: None) -> None:
        """One process needs no message."""

    def input_gradient(self, dy: Tensor, weight: Tensor, kept: None) -> Tensor:
        rows, matrix = dy.reshape(-1, dy.shape[-1]), weight.reshape(-1, weight.shape[-1])
        dx = self.rows(rows, self.gradients) @ self.weight(matrix.T).T
        return dx.reshape(*dy.shape[:-1], -1).to(dy.dtype)

    def weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor, kept: None) -> Tensor:
        return (self.rows(dy.T, self.gradients) @ self.rows(x.T).T).to(weight.dtype).view(weight.shape)

    def add_weight_gradient(self, sink: GradSink, dy: Tensor, x: Tensor, kept: None) -> None:
        sink.add(self.rows(dy.T, self.gradients) @ self.rows(x.T).T)

    def rows(self, x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, height: int = 1) -> Tensor:
        """`[n, k]`, to be contracted over k, as float8 can say it."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.recipe == "tensorwise":
            return said(x, dtype)
        if self.recipe == "rowwise":
            return torch.stack([said(row, dtype) for row in x])
        bands = [[said(part, dtype) for part in band.split(128, 1)] for band in x.split(height)]
        return torch.cat([torch.cat(band, 1) for band in bands])

    def weight(self, x: Tensor) -> Tensor:
        """The same of a weight."""
        return self.rows(x, height=128)


def said(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of one scale, rounded to what `dtype` can say of them."""
    scale = max(float(x.abs().max()), 2.0**-100) / LARGEST[dtype]
    return (x / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).to(x.dtype) * scale
