"""Products of linear layers in 8-bit floating point: operands scaled and rounded to float8, sums in fp32.

    operand    x / scale, rounded to e4m3 (448 at most) or e5m2 (57,344); scale = its largest magnitude / that maximum
    products   y = x W^T,  dx = dy W,  dW = dy^T x: each contracts one dimension, over which scales must be constant

    recipe       one scale for                                                  largest magnitudes travel over
    tensorwise   each tensor                                                    the ranks that hold parts of it
    delayed      each tensor, from updates before (`delayed_scaling`)           all ranks of a stage, at an update
    rowwise      each row of an operand, the contracted dimension along it      those that cut this dimension
    blockwise    128 numbers of a row; of a weight 128 x 128 (arXiv 2412.19437)  none: blocks end where ranks do
    mxfp8        32 numbers of a row, a power of two (OCP MX; arXiv 2506.08027)  none

Formats (arXiv 2209.05433): `e4m3` for all, or `hybrid`: e5m2 for gradients. As scales are those of the whole tensor,
whatever ranks hold it, any layout computes what one process does with micro-batches of the same size.

A weight is looked at and rounded once for all micro-batches that see the same values: parameters share the version
counter of their flat buffer, which every update moves on.

On a CPU the same rounded numbers are multiplied as they are, in fp32 or wider. That is the oracle of the kernel
(`torch._scaled_mm`), and what tests compare layouts by.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megalite.comm import Axis, all_reduce_
from megalite.config import Config, Float8
from megalite.errors import ConfigError
from megalite.gradient import GradSink
from megalite.parallel.tensor import float8_kernels
from megalite.parallel.tensor.float8_kernels import BLOCK, Operand, scale_of
from megalite.parallel.tensor.products import Products

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BY_ROW = "rowwise", "mxfp8"
"""Recipes by which a weight and its transpose have scales of their own."""
BY_BLOCK = "blockwise", "mxfp8"


def product(a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None, *, fast: bool = False) -> Tensor:
    """a b^T + bias, `[n, k]` and `[m, k]` -> `[n, m]` in `dtype`, added up in fp32 or wider. fast: on a GPU the
    sums may keep fewer digits than fp32 within a block, as is usual forward, but where scales are those of blocks."""
    if not a.values.is_cuda:
        y = torch.mm(a.widened(), b.widened().t())
        return (y if bias is None else y + bias).to(dtype)
    # the kernel wants scales by blocks with the rows next to each other
    scale_a, scale_b = a.scale, b.scale
    if scale_a.shape[1] > 1:
        scale_a = scale_a.t().contiguous().t()
    if scale_b.shape[1] > 1 and scale_b.shape[0] == b.values.shape[0]:
        scale_b = scale_b.t().contiguous().t()
    by_tensor, by_block = scale_a.numel() == scale_b.numel() == 1, scale_a.shape[1] > 1
    out = dtype if by_tensor else torch.bfloat16  # the other kernels write nothing else
    fused = bias is not None and out != torch.float32
    how: dict[str, Any] = {"out_dtype": out, "use_fast_accum": fast and not by_block}
    y = torch._scaled_mm(a.values, b.values.t(), scale_a, scale_b.t(), bias=bias if fused else None, **how)
    return (y if bias is None or fused else y + bias).to(dtype)


@dataclass
class Kept:
    """State from a forward to its backward: scales, and where they are noted magnitudes, by operand (x, dy) and the
    dimension that is contracted; dy rounded, if its transpose has the same scale."""

    scales: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    magnitudes: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    gradient: Operand | None = None


@dataclass
class RoundedWeight(Kept):
    """What is known of a weight in one version: scales, and by the dimension that is contracted it in float8.

    travelled: it was rounded before it was gathered, and holds numbers of float8.
    """

    version: Hashable = None
    operands: dict[str, Operand] = field(default_factory=dict)
    travelled: bool = False


class Float8Products(Products):
    """The three products of a linear layer with operands in float8.

    cuts: axes that cut the layer's dimensions in, out and tokens. wide: dtype of scales, and of the emulation. keeps:
    whether a rounded weight stays in memory until an update changes it (2 bytes an element). postponed: whether weight
    gradients are computed later, so that nothing more should be kept for them.
    """

    def __init__(
        self,
        given: Float8,
        cuts: Mapping[str, Sequence[Axis]],
        wide: torch.dtype,
        *,
        keeps: bool = False,
        postponed: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(wide)
        self.recipe, self.wide = given.fp8_recipe, wide
        self._has_one_scale = self.recipe in ("tensorwise", "delayed")  # of a tensor, whatever is contracted
        self.gradients = E5M2 if given.fp8_format == "hybrid" else E4M3
        self.cuts = {dim: [axis for axis in axes if axis.size > 1] for dim, axes in cuts.items()}
        self.keeps, self.postponed = keeps, postponed
        self._rounded = RoundedWeight()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Kept]:
        kept, rows = Kept(), x.flatten(0, -2)
        a, b = self._operand("x", rows, ("tokens", "in"), kept), self._of_weight(weight, "in")
        y = product(a, b, x.dtype, None if bias is None else bias.flatten(), fast=True)
        return y.view(*x.shape[:-1], -1), kept

    def begin_backward(self, dy: Tensor, weight: Tensor, kept: Kept) -> None:
        if self._sharers(("tokens", "out")):
            self._scale("dy", dy.flatten(0, -2), ("tokens", "out"), kept)
        if self._sharers(("in", "out")):
            self._weight_scale(weight, "out")

    def input_gradient(self, dy: Tensor, weight: Tensor, kept: Kept) -> Tensor:
        a, b = self._operand("dy", dy.flatten(0, -2), ("tokens", "out"), kept), self._of_weight(weight, "out")
        if self._has_one_scale and not self.postponed():
            kept.gradient = a
        return product(a, b, dy.dtype).view(*dy.shape[:-1], -1)

    def weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor, kept: Kept) -> Tensor:
        return self._weight_gradient(dy, x, kept).to(weight.dtype).view(weight.shape)

    def add_weight_gradient(self, sink: GradSink, dy: Tensor, x: Tensor, kept: Kept) -> None:
        sink.add(self._weight_gradient(dy, x, kept))

    def _weight_gradient(self, dy: Tensor, x: Tensor, kept: Kept) -> Tensor:
        made, kept.gradient = kept.gradient, None
        a = self._operand("dy", dy.t(), ("out", "tokens"), kept) if made is None else made.transposed()
        return product(a, self._operand("x", x.t(), ("in", "tokens"), kept), self.wide)

    def format_of(self, name: str) -> torch.dtype:
        """The dtype of an operand: x, w or dy."""
        return self.gradients if name == "dy" else E4M3

    def _operand(self, name: str, x: Tensor, dims: tuple[str, str], kept: Kept) -> Operand:
        kernels, dtype = float8_kernels.kernels_on(x.device.type), self.format_of(name)
        if self._has_one_scale or self._sharers(dims):
            scale = self._scale(name, x, dims, kept)
            return Operand(kernels.rounded(x, scale, dtype), scale)
        values, scale = kernels.scaled(x, self.recipe, name == "w", dtype, self.wide)
        return Operand(values.flatten(1), scale.flatten(1))

    def _sharers(self, dims: tuple[str, str]) -> list[Axis]:
        """Axes whose ranks hold parts of what shares a scale, of an operand whose last dimension is contracted."""
        if self.recipe in BY_BLOCK:
            return []
        return [axis for dim in (dims if self._has_one_scale else dims[1:]) for axis in self.cuts[dim]]

    def _of_weight(self, weight: Tensor, contracted: str) -> Operand:
        """The weight `[out, in]`, or its transpose where 'out' is contracted, in float8; made once while it is kept."""
        scale, known = self._weight_scale(weight, contracted), self._rounded.operands
        if contracted in known:
            return known[contracted]
        if contracted == "out" and "in" in known and self.recipe not in BY_ROW:
            operand = known["in"].transposed()
        elif self._rounded.travelled:  # exact
            operand = Operand(weight.detach().flatten(0, -2).to(E4M3), scale)
            operand = operand if contracted == "in" else operand.transposed()
        else:
            rows = weight.detach().flatten(0, -2)
            matrix = rows if contracted == "in" else rows.t()
            operand = Operand(float8_kernels.kernels_on(weight.device.type).rounded(matrix, scale, E4M3), scale)
        if self.keeps:
            known[contracted] = operand
        return operand

    def _weight_scale(self, weight: Tensor, contracted: str) -> Tensor:
        if contracted == "out" and self.recipe not in BY_ROW:
            return self._weight_scale(weight, "in").t()
        if self._rounded.version != self._version_of(weight):
            assert not self._rounded.travelled, "a weight was gathered before its scale was known"
            self._rounded = RoundedWeight(version=self._version_of(weight))
        # detached: a compiler makes other kernels for a parameter
        matrix, other = weight.detach().flatten(0, -2), {"in": "out", "out": "in"}[contracted]
        return self._scale("w", matrix if contracted == "in" else matrix.t(), (other, contracted), self._rounded)

    def before_gather(self, weight: Tensor, most: Tensor) -> Tensor:
        """The scale of a weight of which each rank of a group holds a part; it arrives divided by it and rounded. most:
        its largest magnitude on this rank, `[1, 1]`. Collective over the axes that cut it."""
        found = self._rounded = RoundedWeight(version=self._version_of(weight), travelled=True)
        found.magnitudes["w", ""] = most
        if (scale := self._remembered("w")) is not None:
            found.scales["w", ""] = scale
        return Float8Products._scale(self, "w", most, ("out", "in"), found)

    def rounded(self, part: Tensor, scale: Tensor) -> Tensor:
        """A part of a weight over its scale, in float8."""
        return float8_kernels.kernels_on(part.device.type).rounded(part, scale, E4M3)

    def _remembered(self, name: str) -> Tensor | None:
        """The scale of an operand that nobody has to look at."""
        return None

    def _version_of(self, weight: Tensor) -> Hashable:
        """Equal while the weight's values and its scale are."""
        return weight._version

    def _scale(self, name: str, x: Tensor, dims: tuple[str, str], kept: Kept) -> Tensor:
        """The scale of an operand whose last dimension is contracted, the same on all ranks that hold parts of it."""
        key = name, "" if self._has_one_scale else dims[1]
        if key not in kept.scales:
            most = float8_kernels.kernels_on(x.device.type).largest(x, self.recipe, name == "w").to(self.wide)
            for axis in self._sharers(dims):
                all_reduce_(most, axis, op="max")
            kept.scales[key] = scale_of(most, self.recipe, self.format_of(name))
        return kept.scales[key]


def gather_rounded(module: nn.Module) -> None:
    """Marks the weights that are to be rounded before they are gathered."""
    for layer in module.modules():
        products = getattr(layer, "products", None)
        if isinstance(products, Float8Products) and isinstance(layer.weight, nn.Parameter):
            layer.weight.float8 = products  # type: ignore[attr-defined]  # ours, on a tensor of torch's


def check_float8(config: Config, device: torch.device) -> None:
    """Whether the GPU multiplies in this way: three small products beside their emulation. Raises ConfigError. A CPU
    emulates everything."""
    given = config.training.float8
    if given.fp8_format is None or device.type == "cpu":
        return
    flag = f"`fp8_format`={given.fp8_format}"
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
