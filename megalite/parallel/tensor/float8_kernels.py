"""Operands in float8 and the passes over memory that make them: eager on a CPU, compiled on a GPU.

    largest   magnitudes of `[n, k]`, one for each part that has a scale of its own           reads 2 bytes an element
    rounded   `[n, k]` divided by its scales, in float8                                       reads 2, writes 1
    noted     `rounded`, and the largest magnitude of all                                     reads 2, writes 1
    scaled    both at once, where no other rank has a part of what shares a scale             reads 2 or 4, writes 1
    turned    `[k, n]` of what is in float8                                                   reads 1, writes 1

A compiled function fuses what eager kernels do one by one through copies in fp32: an operand of a layer's products
takes 5 to 8 bytes an element in all, forward and backward, where it took 64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 2.0**-100
"""Taken for the largest magnitude of zeros."""
BLOCK = 128
BLOCKS = {"blockwise": BLOCK, "mxfp8": 32}
"""Numbers of a row that share a scale."""


class Operand(NamedTuple):
    """An operand of a product, `[n, k]` in float8. It stands for `values * scale`; scale `[1, 1]`, `[n, 1]`, or
    a number for each block, `[n or n / 128, k / 128]` or `[n, k / 32]`."""

    values: Tensor
    scale: Tensor

    def widened(self) -> Tensor:
        """`[n, k]` in the scale's dtype."""
        return self.values.to(self.scale.dtype) * expanded(self.scale, self.values)

    def transposed(self) -> Operand:
        """`[k, n]`; the scales are those of the tensor, or of square blocks."""
        return Operand(kernels_on(self.values.device.type).turned(self.values), self.scale.t())


def expanded(scale: Tensor, like: Tensor) -> Tensor:
    """The scale of each element, or one that broadcasts."""
    for dim in (0, 1):
        parts, length = scale.shape[dim], like.shape[dim]
        if parts not in (1, length):
            block = BLOCK if -(-length // BLOCK) == parts else BLOCKS["mxfp8"]
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, length)
    return scale


def largest(x: Tensor, recipe: str, square: bool) -> Tensor:
    """The largest magnitude of each part of `[n, k]` that has a scale of its own, as `Operand` says."""
    if recipe == "rowwise":
        return x.abs().amax(1, keepdim=True)
    if recipe not in BLOCKS:
        return x.abs().amax(1).amax().view(1, 1)  # row by row: a compiler makes one slow kernel of all at once
    block, square = BLOCKS[recipe], square and recipe == "blockwise"
    n, k = x.shape
    rows = -(-n // block) if square else n
    padded = F.pad(x, (0, -k % block, 0, -n % block if square else 0)).abs()
    return padded.view(rows, -1, padded.shape[1] // block, block).amax((1, 3))


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` over its scale; what is larger than the format's largest number becomes that."""
    most = torch.finfo(dtype).max
    return (x.to(scale.dtype) / expanded(scale, x)).clamp(-most, most).to(dtype).contiguous()


def noted(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`rounded`, and the largest magnitude of `x`, 0-dim."""
    return rounded(x, scale, dtype), x.abs().amax(1).amax()  # row by row: so that a compiler fuses it


def scale_of(most: Tensor, recipe: str, dtype: torch.dtype) -> Tensor:
    """The scales of parts with these magnitudes. (A CPU and a GPU divide by a number differently, and what lies
    half-way between two numbers of float8 then goes to either.)"""
    scale = most.clamp(min=TINY) * (1 / torch.finfo(dtype).max)
    return scale.log2().ceil().exp2() if recipe == "mxfp8" else scale


def scaled(x: Tensor, recipe: str, square: bool, dtype: torch.dtype, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """`[n, k]` in float8, and its scales in the dtype `wide`; where whole blocks share one `[n, k / b, b]` and `[n, k /
    b, 1]`, since a view at the end would keep the compiler from fusing both."""
    block = 0 if square and recipe == "blockwise" else BLOCKS.get(recipe, 0)
    if block and x.shape[1] % block == 0:
        rows = x.unflatten(1, (-1, block))
        scale = scale_of(rows.abs().amax(2, keepdim=True).to(wide), recipe, dtype)
        return rounded(rows, scale, dtype), scale
    scale = scale_of(largest(x, recipe, square).to(wide), recipe, dtype)
    return rounded(x, scale, dtype), scale


def turned(values: Tensor) -> Tensor:
    """`[n, k]` in float8 -> `[k, n]`. As bytes, which any kernel can copy; torch's own reads them one by one across."""
    return values.view(torch.uint8).t().contiguous().view(values.dtype)


class Kernels(NamedTuple):
    """The functions, compiled or not."""

    largest: Callable[[Tensor, str, bool], Tensor] = largest
    rounded: Callable[[Tensor, Tensor, torch.dtype], Tensor] = rounded
    noted: Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]] = noted
    scaled: Callable[[Tensor, str, bool, torch.dtype, torch.dtype], tuple[Tensor, Tensor]] = scaled
    turned: Callable[[Tensor], Tensor] = turned

    @classmethod
    def compiled(cls, backend: str = "inductor") -> Kernels:
        """By `torch.compile`, once for all sizes of an operand."""
        compiled: Any = (torch.compile(function, backend=backend, dynamic=True) for function in cls())
        return cls(*compiled)


@functools.cache
def kernels_on(device_type: str) -> Kernels:
    """What makes operands on a device: 'cpu', 'cuda'."""
    return Kernels() if device_type == "cpu" else Kernels.compiled()
