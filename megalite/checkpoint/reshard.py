"""Resharding as geometry: pure functions on rectangles, no file and no process group in sight.

A checkpoint is a tiling of each logical tensor by stored boxes; a layout is a set of wanted boxes. Loading anywhere is
their intersection. Saving is the choice of who writes which part of a box that several ranks hold.

    stored (tp=2, by columns)      wanted (ZeRO, flat ranges)       pieces
    +-----+-----+                  +-----------+                    +-----+-----+
    |  A  |  B  |                  |     x     |                    | A∩x | B∩x |
    |     |     |        ∩         +--------+--+         =          +-----+--+--+
    |     |     |                  |  y     |                       | A∩y |B∩y|
    +-----+-----+                  +--------+                       +-----+---+
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """The rectangle `offset .. offset + shape` of a logical tensor. A scalar is the box `() ()` with one element."""

    offset: Shape
    shape: Shape

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
        """Where this box lies in a tensor that holds `outer`."""
        return tuple(
            slice(start - base, start - base + extent)
            for start, extent, base in zip(self.offset, self.shape, outer.offset, strict=True)
        )

    def rows(self, first: int, last: int) -> Box:
        """Rows `first .. last` (counted inside the box) along dim 0."""
        return Box((self.offset[0] + first, *self.offset[1:]), (last - first, *self.shape[1:]))


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None. Sorted along dim 0, so flat ranges cost n log n."""
    if len(boxes) < 2:
        return None
    active: list[Box] = []
    for box in sorted((b for b in boxes if b.numel), key=lambda b: b.offset):
        if not box.shape:
            if active:
                return active[0], box
        else:
            active = [other for other in active if other.end[0] > box.offset[0]]
        for other in active:
            if box.shape and box.intersect(other):
                return other, box
        active.append(box)
    return None


def cover(wanted: Box, stored: Sequence[Box]) -> list[tuple[int, Box]]:
    """The pieces `(index into stored, common part)` that make up `wanted`.

    Raises ValueError naming how many elements are covered where they are not all covered exactly once.
    """
    pieces = []
    for index, box in enumerate(stored):
        common = box.intersect(wanted)
        if common is not None:
            pieces.append((index, common))
    covered = sum(piece.numel for _, piece in pieces)
    if covered != wanted.numel or find_overlap([piece for _, piece in pieces]):
        raise ValueError(f"{covered} of {wanted.numel} elements of {wanted} are stored")
    return pieces


@dataclass(frozen=True)
class HeldRectangle:
    """That a rank holds `box` of tensor `name`: `itemsize` bytes an element, place `index` in the rank's list."""

    name: str
    box: Box
    itemsize: int
    index: int
    replica: int = 0


@dataclass(frozen=True)
class WriteDuty:
    """That a rank writes `box`, a part of what it holds at `index`."""

    index: int
    box: Box


# Below this a box is written by one rank; above, its rows are dealt out over the ranks that hold it.
_SPLIT_BYTES = 2**20


def share_out(holdings: Sequence[Sequence[HeldRectangle]]) -> list[list[WriteDuty]]:
    """Decides who writes what: every box once, the bytes spread over the ranks that hold copies.

    holdings[r] is what rank r holds; a box of which no rank holds replica 0 is a copy of parts of others and is not
    written. The result depends only on the arguments, so every rank computes the same. Large boxes are cut by rows over
    their holders; small ones go, largest first, to the holder with the fewest bytes so far.
    """
    holders: dict[tuple[str, Box], list[tuple[int, HeldRectangle]]] = {}
    for rank, items in enumerate(holdings):
        for holding in items:
            if holding.box.numel:
                holders.setdefault((holding.name, holding.box), []).append((rank, holding))
    duties: list[list[WriteDuty]] = [[] for _ in holdings]
    load = [0] * len(holdings)

    def give(rank: int, holding: HeldRectangle, box: Box) -> None:
        duties[rank].append(WriteDuty(holding.index, box))
        load[rank] += box.numel * holding.itemsize

    small = []
    for (_, box), copies in holders.items():
        if all(holding.replica for _, holding in copies):
            continue
        nbytes, parts = box.numel * copies[0][1].itemsize, len(copies)
        if parts > 1 and (nbytes < _SPLIT_BYTES or not box.shape or box.shape[0] < parts):
            small.append((nbytes, copies))
            continue
        bounds = [box.shape[0] * i // parts for i in range(parts + 1)] if parts > 1 else []
        for i, (rank, holding) in enumerate(copies):
            give(rank, holding, box.rows(bounds[i], bounds[i + 1]) if bounds else box)
    for _, copies in sorted(small, key=lambda item: -item[0]):
        rank, holding = min(copies, key=lambda copy: (load[copy[0]], copy[0]))
        give(rank, holding, holding.box)
    return [sorted(mine, key=lambda duty: (duty.index, duty.box.offset)) for mine in duties]
