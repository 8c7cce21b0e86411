"""Products of linear layers in 8-bit floating point: operands scaled and rounded to float8, sums in fp32.

    operand    x / scale, rounded to e4m3 (448 at most) or e5m2 (57,344); scale = its largest magnitude / that maximum
    products   y = x W^T,  dx = dy W,  dW = dy^T x: each contracts one dimension, over which scales must be constant

    recipe       one scale for                                                  largest magnitudes travel over
    tensorwise   each tensor                                                    the ranks that hold parts of it
    delayed      each tensor, from updates before (`delayed_scaling`)           all ranks of a stage, at an update
    rowwise      each row of an operand, the contracted dimension along it      those that cut this dimension
    blockwise    128 numbers of a row; of a weight 128 x 128 (arXiv 2412.19437)  none: blocks end where ranks do

Formats (arXiv 2209.05433): `e4m3` for all, or `hybrid`: e5m2 for gradients. As scales are those of the whole tensor,
whatever ranks hold it, any layout computes what one process does with micro-batches of the same size.

On a CPU the same rounded numbers are multiplied as they are, in fp32 or wider. That is the oracle of the kernel
(`torch._scaled_mm`), and what tests compare layouts by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.comm import Axis, all_reduce_
from megalite.config import Config, Float8
from megalite.errors import ConfigError
from megalite.gradient import GradSink
from megalite.parallel.tensor.products import Products

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128
MULTIPLE = 16
"""A GPU's kernel needs every dimension of a product to be one of this."""
TINY = 2.0**-100
"""Taken for the largest magnitude of zeros."""


class Operand(NamedTuple):
    """An operand of a product, `[n, k]` in float8. It stands for `values * scale`; scale `[1, 1]`, `[n, 1]`, or
    a number for each block, `[n or n / 128, k / 128]`."""

    values: Tensor
    scale: Tensor

    def widened(self) -> Tensor:
        """`[n, k]` in the scale's dtype."""
        return self.values.to(self.scale.dtype) * expanded(self.scale, self.values)


def expanded(scale: Tensor, like: Tensor) -> Tensor:
    """The scale of each element, or one that broadcasts."""
    for dim in (0, 1):
        if scale.shape[dim] not in (1, like.shape[dim]):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, like.shape[dim])
    return scale


def largest(x: Tensor, recipe: str, *, square: bool) -> Tensor:
    """The largest magnitude of each part of `[n, k]` that has a scale of its own, as `Operand` says."""
    if recipe == "rowwise":
        return x.abs().amax(1, keepdim=True)
    if recipe != "blockwise":
        return x.abs().amax().view(1, 1)
    n, k = x.shape
    rows = -(-n // BLOCK) if square else n
    padded = F.pad(x, (0, -k % BLOCK, 0, -n % BLOCK if square else 0)).abs()
    return padded.view(rows, -1, padded.shape[1] // BLOCK, BLOCK).amax((1, 3))


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Operand:
    """`x` `[n, k]` with this scale; what is larger than the format's largest number becomes that."""
    most = torch.finfo(dtype).max
    values = (x.to(scale.dtype) / expanded(scale, x)).clamp(-most, most)
    return Operand(values.to(dtype).contiguous(), scale)


def product(a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a b^T + bias, `[n, k]` and `[m, k]` -> `[n, m]` in `dtype`, added up in fp32 or wider."""
    if not a.values.is_cuda:
        y = torch.mm(a.widened(), b.widened().t())
        return (y if bias is None else y + bias).to(dtype)
    # the kernel wants scales by blocks with the rows next to each other
    scale_a, scale_b = a.scale, b.scale
    if scale_a.shape[1] > 1:
        scale_a = scale_a.t().contiguous().t()
    if scale_b.shape[1] > 1 and scale_b.shape[0] == b.values.shape[0]:
        scale_b = scale_b.t().contiguous().t()
    by_tensor = scale_a.numel() == scale_b.numel() == 1
    out = dtype if by_tensor else torch.bfloat16  # the other kernels write nothing else
    fused = bias is not None and out != torch.float32
    y = torch._scaled_mm(a.values, b.values.t(), scale_a, scale_b.t(), bias=bias if fused else None, out_dtype=out)
    return (y if bias is None or fused else y + bias).to(dtype)


@dataclass
class Kept:
    """State from a forward to its backward: scales by operand (x, w, dy) and the dimension that is contracted."""

    scales: dict[tuple[str, str], Tensor] = field(default_factory=dict)


class Float8Products(Products):
    """The three products of a linear layer with operands in float8.

    cuts: axes that cut the layer's dimensions in, out and tokens. wide: dtype of scales, and of the emulation.
    """

    def __init__(self, given: Float8, cuts: Mapping[str, Sequence[Axis]], wide: torch.dtype) -> None:
        super().__init__(wide)
        self.recipe, self.wide = given.fp8_recipe, wide
        self.gradients = E5M2 if given.fp8_format == "hybrid" else E4M3
        self.cuts = {dim: [axis for axis in axes if axis.size > 1] for dim, axes in cuts.items()}

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Kept]:
        kept, rows = Kept(), x.flatten(0, -2)
        a = self._operand("x", rows, ("tokens", "in"), kept)
        b = self._operand("w", weight.flatten(0, -2), ("out", "in"), kept)
        return product(a, b, x.dtype, None if bias is None else bias.flatten()).view(*x.shape[:-1], -1), kept

    def begin_backward(self, dy: Tensor, weight: Tensor, kept: Kept) -> None:
        self._scale("dy", dy.flatten(0, -2), ("tokens", "out"), kept)
        self._scale("w", weight.flatten(0, -2).t(), ("in", "out"), kept)

    def input_gradient(self, dy: Tensor, weight: Tensor, kept: Kept) -> Tensor:
        a = self._operand("dy", dy.flatten(0, -2), ("tokens", "out"), kept)
        b = self._operand("w", weight.flatten(0, -2).t(), ("in", "out"), kept)
        return product(a, b, dy.dtype).view(*dy.shape[:-1], -1)

    def weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor, kept: Kept) -> Tensor:
        return self._weight_gradient(dy, x, kept).to(weight.dtype).view(weight.shape)

    def add_weight_gradient(self, sink: GradSink, dy: Tensor, x: Tensor, kept: Kept) -> None:
        sink.add(self._weight_gradient(dy, x, kept))

    def _weight_gradient(self, dy: Tensor, x: Tensor, kept: Kept) -> Tensor:
        a = self._operand("dy", dy.t(), ("out", "tokens"), kept)
        b = self._operand("x", x.t(), ("in", "tokens"), kept)
        return product(a, b, self.wide)

    def _operand(self, name: str, x: Tensor, dims: tuple[str, str], kept: Kept) -> Operand:
        return rounded(x, self._scale(name, x, dims, kept), self.format_of(name))

    def format_of(self, name: str) -> torch.dtype:
        """The dtype of an operand: x, w or dy."""
        return self.gradients if name == "dy" else E4M3

    def _scale(self, name: str, x: Tensor, dims: tuple[str, str], kept: Kept) -> Tensor:
        """The scale of an operand whose last dimension is contracted, the same on all ranks that hold parts of it."""
        whole = self.recipe in ("tensorwise", "delayed")
        key = name, "" if whole else dims[1]
        if key not in kept.scales:
            most = largest(x, self.recipe, square=name == "w").to(self.wide)
            for dim in dims if whole else dims[1:]:
                for axis in self.cuts[dim] if self.recipe != "blockwise" else ():
                    all_reduce_(most, axis, op="max")
            kept.scales[key] = most.clamp(min=TINY) / torch.finfo(self.format_of(name)).max
        return kept.scales[key]


def check_float8(config: Config, device: torch.device) -> None:
    """Whether the GPU multiplies in this way: three small products beside their emulation, and the run's own sizes.
    Raises ConfigError. A CPU emulates everything."""
    given, model = config.training.float8, config.model
    if given.fp8_format is None or device.type == "cpu":
        return
    flag = f"`fp8_format`={given.fp8_format}"
    if not config.training.precision.bf16:
        raise ConfigError(f"{flag}: needs `bf16` on a GPU")
    tp, step = config.parallel.tensor_model_parallel_size, BLOCK if given.fp8_recipe == "blockwise" else MULTIPLE
    tokens = model.seq_length * config.training.micro_batch_size // config.parallel.context.context_parallel_size
    sizes = {
        "`hidden_size`": model.hidden_size,
        "queries, keys and values of a rank": (model.query_size + 2 * model.kv_size) // tp,
        "the heads of a rank": model.query_size // tp,
        "`ffn_hidden_size` of a rank": model.ffn_size // tp,
        "tokens of a micro-batch": tokens,
    }
    odd = next((f"{what} = {size}" for what, size in sizes.items() if size % step), None)
    if odd is not None:
        raise ConfigError(f"{flag}: {odd} is no multiple of {step}, which the kernel needs; change it, or drop {flag}")
    try:
        wrong = _worst_difference(given, device)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{flag}, `fp8_recipe`={given.fp8_recipe}: not on this GPU with this torch: {reason}"
        ) from error
    if not wrong < 1e-2:
        raise ConfigError(
            f"{flag}, `fp8_recipe`={given.fp8_recipe}: products are wrong by {wrong:.2g} of their size here"
        )


def _worst_difference(given: Float8, device: torch.device) -> float:
    """The largest error of the kernel's three products beside their emulation, relative to their largest number."""
    generator = torch.Generator().manual_seed(1)
    x, weight, dy = (torch.randn(2 * BLOCK, 2 * BLOCK, generator=generator).bfloat16() for _ in range(3))
    results = []
    for place in (torch.device("cpu"), device):
        products = Float8Products(given, {"in": (), "out": (), "tokens": ()}, torch.float32)
        rows, matrix, gradient = (operand.to(place) for operand in (x, weight, dy))
        y, kept = products.forward(rows, matrix, None)
        dx = products.input_gradient(gradient, matrix, kept)
        results.append([y, dx, products.weight_gradient(gradient, rows, matrix, kept)])
    return max(
        float((found.cpu().float() - right.float()).abs().max() / right.float().abs().max())
        for right, found in zip(*results, strict=True)
    )
