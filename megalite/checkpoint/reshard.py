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
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Shape = tuple[int, ...]


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
    pieces = []
    for index, box in enumerate(stored):
        common = box.intersect(wanted)
        if common is not None:
            pieces.append((index, common))
    covered = sum(piece.numel for _, piece in pieces)
    if covered != wanted.numel or find_overlap([piece for _, piece in pieces]):
        raise ValueError(f"{covered} of {wanted.numel} elements of {wanted} are stored")
    return pieces


class HeldRectangle(NamedTuple):
    """A rank's rectangle: `box` of tensor `name`, `itemsize` bytes an element, at `place` in the rank's list. replica:
    number of the copy; of a kind of ranks the lowest that one of them holds."""

    name: str
    box: Box
    itemsize: int
    place: int
    replica: int = 0


@dataclass(frozen=True)
class WriteDuty:
    """An order to a rank to write `box`, a part of what it holds at `index`."""

    index: int
    box: Box


# Below this a box is written by one rank; above, its rows are dealt out over the ranks that hold it.
_SPLIT_BYTES = 2**20


Held = tuple[str, Box]
"""(Name of a tensor, a box of it)"""


@dataclass(frozen=True)
class Duties:
    """The write duties of all ranks, computed for the one that asks.

    holdings, kinds: as `share_out` got them. writers: the ranks that write a box, several of them each its rows.
    """

    holdings: Sequence[Sequence[HeldRectangle]]
    kinds: Sequence[int]
    writers: Mapping[Held, Sequence[int]]

    def of(self, rank: int) -> list[WriteDuty]:
        mine = []
        held = self.holdings[self.kinds[rank]]
        once = {(holding.name, holding.box): holding for holding in reversed(held)}  # tied weights may lie here twice
        for key, holding in once.items():
            ranks = self.writers.get(key, ())
            if len(ranks) > 1:
                part, parts, rows = bisect_left(ranks, rank), len(ranks), holding.box.shape[0]
                box = holding.box.rows(rows * part // parts, rows * (part + 1) // parts)
                mine.append(WriteDuty(holding.place, box))
            elif rank in ranks:
                mine.append(WriteDuty(holding.place, holding.box))
        return sorted(mine, key=lambda duty: (duty.index, duty.box.offset))


def share_out(holdings: Sequence[Sequence[HeldRectangle]], kinds: Sequence[int] | None = None) -> Duties:
    """Decides who writes what: every box once, the bytes spread over the ranks that hold copies.

    holdings[k] is what a rank of kind k holds, kinds[r] the kind of rank r (None: each is its own): replicas of a model
    are alike, so the work does not grow with them. A box of which nobody holds replica 0 is a copy of parts of others
    and is not written. The result depends only on the arguments, so every rank computes the same. Large boxes are cut
    by rows over their holders; small ones go, largest first, to the holder with the fewest bytes so far.
    """
    kinds = range(len(holdings)) if kinds is None else kinds
    members: list[list[int]] = [[] for _ in holdings]
    for rank, kind in enumerate(kinds):
        members[kind].append(rank)
    first: dict[Held, int] = {}
    also: dict[Held, list[int]] = {}  # kinds that hold it beside the first
    itemsizes: dict[Held, int] = {}
    for kind, items in enumerate(holdings):
        for name, box, itemsize, _, replica in items:
            key = name, box
            if first.setdefault(key, kind) != kind:
                also.setdefault(key, []).append(kind)
            if not replica:
                itemsizes[key] = itemsize
    load = [0] * len(kinds)
    writers: dict[Held, Sequence[int]] = {}
    small = []
    for key, kind in first.items():
        box, holders = key[1], members[kind]
        nbytes = box.numel * itemsizes.get(key, 0)
        if not nbytes:
            continue
        if key in also:
            holders = sorted(rank for each in dict.fromkeys([kind, *also[key]]) for rank in members[each])
        parts = len(holders)
        if parts > 1 and (nbytes < _SPLIT_BYTES or not box.shape or box.shape[0] < parts):
            small.append((nbytes, key, holders))
            continue
        for rank in holders:
            load[rank] += nbytes // parts
        writers[key] = holders
    for nbytes, key, holders in sorted(small, key=lambda item: -item[0]):
        rank = min(holders, key=load.__getitem__)
        load[rank] += nbytes
        writers[key] = [rank]
    return Duties(holdings, kinds, writers)
