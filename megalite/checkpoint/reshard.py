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

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.inventory import Box


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


Held = tuple[str, Box]  # (name of a tensor, a box of it)


@dataclass(frozen=True)
class Duties:
    """The write duties of all ranks, computed for the one that asks. holdings, kinds: as `share_out` got them. writers:
    the ranks that write a box, several of them each its rows."""

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


def share_out(holdings: Sequence[Sequence[HeldRectangle]], kinds: Sequence[int]) -> Duties:
    """Decides who writes what: every box once, the bytes spread over the ranks that hold copies.

    holdings[k] is what a rank of kind k holds, kinds[r] the kind of rank r: replicas of a model are alike, so the work
    does not grow with them. A box of which nobody holds replica 0 is a copy of parts of others and is not written. The
    result depends only on the arguments, so every rank computes the same. Large boxes are cut by rows over their
    holders; small ones go, largest first, to the holder with the fewest bytes so far.
    """
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
