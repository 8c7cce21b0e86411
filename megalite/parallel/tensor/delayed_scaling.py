"""Scales of float8 operands from what they were in the updates before (`--fp8-recipe delayed`).

    scale = largest of the history of magnitudes / the format's largest number

So an operand is scaled and rounded in one pass, without looking at it first, and no message travels in a product. What
an operand was is noted meanwhile, and every update appends the largest magnitude of its micro-batches, over all
replicas (`train.scale_history`). A number that has outgrown its history becomes the largest of the format.

Weights that have seen no update have no history: products with them take the scales of `tensorwise`. An operand that
has only been zero is not scaled.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalite.comm import Axis
from megalite.config import Float8
from megalite.microbatch_notes import OPERANDS, Magnitudes
from megalite.parallel.tensor import float8_kernels
from megalite.parallel.tensor.float8 import Float8Products, Kept
from megalite.parallel.tensor.float8_kernels import Operand


class ScaleTable:
    """Histories and scales of the layers of one weight version of a stage.

    history: `[layers, 3, n]`, of x, w and dy, the newest first. scales: `[layers, 3, 1, 1]`. known: whether an update
    has written them. taken_up: how often.
    """

    def __init__(self, layers: Sequence[DelayedProducts]) -> None:
        first = layers[0]
        self.history = torch.zeros(len(layers), len(OPERANDS), first.length, dtype=first.wide, device=first.device)
        # A GPU's kernel reads a scale at an address that 16 divides, and refuses any other.
        room = len(layers), len(OPERANDS), 16 // first.wide.itemsize, 1
        self.scales = torch.ones(room, dtype=first.wide, device=first.device)[:, :, :1]
        highest = [torch.finfo(first.format_of(name)).max for name in OPERANDS]
        self._highest = torch.tensor(highest, dtype=first.wide, device=first.device)
        self.known, self.taken_up = False, 0
        for number, products in enumerate(layers):
            products.table, products.layer = self, number

    def take_up(self) -> None:
        """From now on scales are those of the history as it is now."""
        most = self.history.amax(2)
        self.scales.copy_(torch.where(most > 0, most / self._highest, 1.0)[..., None, None])
        self.known, self.taken_up = True, self.taken_up + 1


class DelayedProducts(Float8Products):
    """The products of one layer of one weight version.

    table: of all layers of its stage, where it is number `layer`; None: scales are those of `tensorwise`.
    """

    def __init__(
        self, given: Float8, *args: Any, magnitudes: Magnitudes, device: torch.device | str, **how: Any
    ) -> None:
        super().__init__(given, *args, **how)
        self.magnitudes, self.length, self.device = magnitudes, given.fp8_amax_history_len, device
        self.table: ScaleTable | None = None
        self.layer = 0

    def _scale(self, name: str, x: Tensor, dims: tuple[str, str], kept: Kept) -> Tensor:
        key = name, ""
        if self.magnitudes.wanted and (key not in kept.scales or name == "w"):
            if key not in kept.magnitudes:  # of a weight once for all micro-batches
                look = float8_kernels.kernels_on(x.device.type).largest
                kept.magnitudes[key] = look(x, self.recipe, False).to(self.wide)
            self.magnitudes.note(self.layer, name, kept.magnitudes[key])
        if key not in kept.scales and (scale := self._remembered(name)) is not None:
            kept.scales[key] = scale
        return super()._scale(name, x, dims, kept)

    def _operand(self, name: str, x: Tensor, dims: tuple[str, str], kept: Kept) -> Operand:
        key, scale = (name, ""), self._remembered(name)
        if scale is None or key in kept.scales or not self.magnitudes.wanted:
            return super()._operand(name, x, dims, kept)
        kept.scales[key] = scale
        values, most = float8_kernels.kernels_on(x.device.type).noted(x, scale, self.format_of(name))
        self.magnitudes.note(self.layer, name, most.to(self.wide))
        return Operand(values, scale)

    def _remembered(self, name: str) -> Tensor | None:
        table = self.table
        return table.scales[self.layer, OPERANDS.index(name)] if table is not None and table.known else None

    def _sharers(self, dims: tuple[str, str]) -> list[Axis]:
        """None, once scales are those of a history."""
        return [] if self.table is not None and self.table.known else super()._sharers(dims)

    def _version_of(self, weight: Tensor) -> Hashable:
        return super()._version_of(weight), None if self.table is None else self.table.taken_up


def delayed_products(module: nn.Module) -> dict[str, DelayedProducts]:
    """Logical name of a layer (`layers.3.mlp.fc1`) -> its products, of all that have such ones, in their order."""
    layers = ((path, getattr(layer, "products", None)) for path, layer in module.named_modules())
    return {path: found for path, found in layers if isinstance(found, DelayedProducts)}
