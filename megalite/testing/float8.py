"""Products in float8 as their definition says it, for one process: what `parallel.tensor.float8` must equal.

With `delayed` scales each layer remembers how large its operands x, w and dy were: `seen` in the batch at hand, `past`
in those before `[3, n]`, of which scales are made once there is something in it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megalite.config import Float8
from megalite.gradient import GradSink

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class PlainFloat8:
    """Takes the place of a layer's `products`."""

    def __init__(self, given: Float8) -> None:
        self.recipe, narrow = given.fp8_recipe, torch.float8_e5m2
        self.past = torch.zeros(3, given.fp8_amax_history_len, dtype=torch.float64)
        self.seen = torch.zeros(3, dtype=torch.float64)
        self.gradients = narrow if given.fp8_format == "hybrid" else torch.float8_e4m3fn

    @classmethod
    def replace(cls, model: nn.Module, given: Float8) -> dict[str, PlainFloat8]:
        """In all layers of the model; those whose scales come from batches before, by name."""
        replaced: dict[str, PlainFloat8] = {}
        for name, module in model.named_modules():
            if given.fp8_format is not None and hasattr(module, "products"):
                module.products = replaced[name] = cls(given)
        return replaced if given.fp8_recipe == "delayed" else {}

    def after_batch(self, past: Tensor) -> Tensor:
        """What the next weights know: `past` of the newest ones, and the batch at hand, which comes first."""
        seen, self.seen = self.seen, torch.zeros_like(self.seen)
        return torch.cat([seen[:, None], past[:, :-1]], 1)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
        matrix = self.weight(weight.reshape(-1, weight.shape[-1]))
        y = self.rows(x.reshape(-1, x.shape[-1]), "x") @ matrix.T
        y = y if bias is None else y + bias.reshape(-1)
        return y.reshape(*x.shape[:-1], -1).to(x.dtype), None

    def begin_backward(self, dy: Tensor, weight: Tensor, kept: None) -> None:
        """One process needs no message."""

    def input_gradient(self, dy: Tensor, weight: Tensor, kept: None) -> Tensor:
        rows, matrix = dy.reshape(-1, dy.shape[-1]), weight.reshape(-1, weight.shape[-1])
        dx = self.rows(rows, "dy") @ self.weight(matrix.T).T
        return dx.reshape(*dy.shape[:-1], -1).to(dy.dtype)

    def weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor, kept: None) -> Tensor:
        return (self.rows(dy.T, "dy") @ self.rows(x.T, "x").T).to(weight.dtype).view(weight.shape)

    def add_weight_gradient(self, sink: GradSink, dy: Tensor, x: Tensor, kept: None) -> None:
        sink.add(self.rows(dy.T, "dy") @ self.rows(x.T, "x").T)

    def rows(self, x: Tensor, name: str, height: int = 1) -> Tensor:
        """Operand `[n, k]`, to be contracted over k, as float8 can say it."""
        x, dtype = x.to(torch.promote_types(x.dtype, torch.float32)), torch.float8_e4m3fn
        dtype = self.gradients if name == "dy" else dtype
        if self.recipe == "delayed":
            operand = ("x", "w", "dy").index(name)
            self.seen[operand] = max(float(self.seen[operand]), float(x.abs().max()))
            return said(x, dtype, float(self.past[operand].max()) if self.past.any() else None)
        if self.recipe == "tensorwise":
            return said(x, dtype)
        if self.recipe == "rowwise":
            return torch.stack([said(row, dtype) for row in x])
        if self.recipe == "mxfp8":  # OCP MX: 32 numbers of a row share a power of two
            return torch.stack([torch.cat([power(part, dtype) for part in row.split(32)]) for row in x])
        bands = [[said(part, dtype) for part in band.split(128, 1)] for band in x.split(height)]
        return torch.cat([torch.cat(band, 1) for band in bands])

    def weight(self, x: Tensor) -> Tensor:
        """The same of a weight."""
        return self.rows(x, "w", height=128)


def power(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same with the smallest power of two for a scale with which nothing is cut off."""
    exponent = math.ceil(math.log2(max(float(x.abs().max()), 2.0**-100) / LARGEST[dtype]))
    return torch.ldexp(torch.ldexp(x, torch.tensor(-exponent)).to(dtype).to(x.dtype), torch.tensor(exponent))


def said(x: Tensor, dtype: torch.dtype, most: float | None = None) -> Tensor:
    """Numbers of one scale, rounded to what `dtype` can say of them. most: taken for the largest of them."""
    scale = max(float(x.abs().max()) if most is None else most, 2.0**-100) / LARGEST[dtype]
    return (x / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).to(x.dtype) * scale
