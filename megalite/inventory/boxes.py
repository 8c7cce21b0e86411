"""Boxes of logical tensors: pure geometry, of which resharding and transfers between stages are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megalite.inventory.parameter_placement import Shape


class Box(NamedTuple):
    """The rectangle `offset .. offset + shape` of a logical tensor. A scalar is the box `() ()` with one element."""

    offset: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> Shape:
        return tuple(start + extent for start, extent in zip(self.offset, self.shape, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offset, self.end, strict=True)) + "]"

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None where there is none."""
        offset, shape = [], []
        for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            first = max(a, b)
            extent = min(a + m, b + n) - first
            if extent <= 0:
                return None
            offset.append(first)
            shape.append(extent)
        return Box(tuple(offset), tuple(shape))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """The slices of this box in a tensor that holds `outer`."""
        return tuple(
            slice(start - base, start - base + extent)
            for start, extent, base in zip(self.offset, self.shape, outer.offset, strict=True)
        )

    def rows(self, first: int, last: int) -> Box:
        """Rows `first .. last` (counted inside the box) along dim 0."""
        return Box((self.offset[0] + first, *self.offset[1:]), (last - first, *self.shape[1:]))


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None. Swept along dim 0, so flat ranges cost n log n."""
    if len(boxes) < 2:
        return None
    active: list[tuple[int, int, int, Box]] = []  # (where it ends along dim 0, begins and ends along dim 1, box)
    for box in sorted(b for b in boxes if all(b.shape)):
        row, column = (*box.offset, 0, 0)[:2]
        rows, columns = (*box.shape, 1, 1)[:2]
        active = [item for item in active if item[0] > row]
        for other in [item[3] for item in active if item[1] < column + columns and item[2] > column]:
            if box.intersect(other):
                return other, box
        active.append((row + rows, column, column + columns, box))
    return None


def cover(wanted: Box, stored: Sequence[Box]) -> list[tuple[int, Box]]:
    """The pieces `(index into stored, common part)` that make up `wanted`.

    Raises ValueError naming how many elements are covered where they are not all covered exactly once.
    """
    pieces = [(index, common) for index, box in enumerate(stored) if (common := box.intersect(wanted)) is not None]
    covered = sum(piece.numel for _, piece in pieces)
    if covered != wanted.numel or find_overlap([piece for _, piece in pieces]):
        raise ValueError(f"{covered} of {wanted.numel} elements of {wanted} are stored")
    return pieces
