"""Frozen matrices in 8 bits, a scale for each row: W = scale * codes, dequantised in the product (`--lora int8`).

    scale `[..., out, 1]` = max |W| of the whole row / 127        codes `[..., out, in]` = round(W / scale), int8

The scale is that of a whole row, also where ranks share it, so the numbers are the same at every layout: a run is bit
for bit one on the dequantised weights. Backward dequantises again, so nothing but codes is kept between the two.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megalite.comm import Axis, all_reduce_
from megalite.parallel.tensor.linear import Linear, RowParallelLinear
from megalite.parallel.tensor.products import Products

LARGEST = 127


class Int8Products(Products):
    """Products with codes in the weight's place. scale: of each row."""

    def __init__(self, dtype: torch.dtype, scale: Tensor) -> None:
        super().__init__(dtype)
        self.scale = scale

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
        return super().forward(x, dequantised(weight, self.scale, x.dtype), bias)

    def input_gradient(self, dy: Tensor, weight: Tensor, kept: Any) -> Tensor:
        return super().input_gradient(dy, dequantised(weight, self.scale, dy.dtype), kept)


def dequantised(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """codes * scale, rounded once."""
    return codes.to(dtype).mul_(scale)


def in_8_bits(weight: Tensor, shared: Axis | None = None) -> tuple[Tensor, Tensor]:
    """(Codes, scales) of a matrix `[..., out, in]`; collective over the ranks that share its rows. A row of zeros has
    scale 1."""
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    largest = wide.abs().amax(-1, keepdim=True)
    if shared is not None:
        all_reduce_(largest, shared, op="max")
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (wide / scale).round_().to(torch.int8), scale


def place_of(x: Tensor) -> tuple[int, int]:
    """Where a tensor is, whether or not it has memory: versions of a parameter may be in one place."""
    return x.untyped_storage()._cdata, int(x.storage_offset())


def hold_in_8_bits(modules: Iterable[nn.Module]) -> None:
    """The matrices of the blocks among the modules from now on; all of a model's versions at once, which share codes as
    they share weights. Collective over the tensor axis."""
    made: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    named = [each for module in modules for each in module.named_modules()]
    for layer in (layer for name, layer in named if ".layers." in f".{name}" and isinstance(layer, Linear)):
        place = place_of(layer.weight)
        if place not in made:
            made[place] = in_8_bits(layer.weight, layer.tp if isinstance(layer, RowParallelLinear) else None)
        layer.weight.data, scale = made[place]
        layer.products = Int8Products(layer.products.dtype, scale)
