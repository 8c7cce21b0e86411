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

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.checkpoint.format import StoredTensor
from megalite.inventory import Box


class HeldRectangle(NamedTuple):
    """A rank's rectangle: `box` of tensor `name`."""

    name: str
    box: Box
    replica: int = 0  # number of the copy; of a kind of ranks the lowest that one of them holds


# Below this a box is written by one rank; above, its rows are dealt out over the ranks that hold it.
_SPLIT_BYTES = 2**20


Held = tuple[str, Box]  # (name of a tensor, a box of it)


@dataclass(frozen=True)
class SavePlan:
    """All logical tensors, and what the ranks write of them, computed for the one that asks."""

    tensors: Mapping[str, StoredTensor]
    holdings: Sequence[Sequence[HeldRectangle]]  # as `share_out` got them
    kinds: Sequence[int]
    writers: Mapping[Held, Sequence[int]]  # of a box; several of them write each its rows

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def of(self, rank: int) -> dict[int, Box]:
        """What a rank writes: number of a rectangle among those that it holds -> the part of it."""
        mine: dict[int, Box] = {}
        held = self.holdings[self.kinds[rank]]
        once = {(each.name, each.box): index for index, each in reversed(list(enumerate(held)))}  # tied weights twice
        for key, index in once.items():
            box, ranks = key[1], self.writers.get(key, ())
            if len(ranks) > 1:
                part, parts, rows = bisect_left(ranks, rank), len(ranks), box.shape[0]
                mine[index] = box.rows(rows * part // parts, rows * (part + 1) // parts)
            elif rank in ranks:
                mine[index] = box
        return dict(sorted(mine.items()))


def share_out(
    tensors: Mapping[str, StoredTensor], holdings: Sequence[Sequence[HeldRectangle]], kinds: Sequence[int]
) -> SavePlan:
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
    originals: set[Held] = set()
    for kind, items in enumerate(holdings):
        for name, box, replica in items:
            key = name, box
            if first.setdefault(key, kind) != kind:
                also.setdefault(key, []).append(kind)
            if not replica:
                originals.add(key)
    load = [0] * len(kinds)
    writers: dict[Held, Sequence[int]] = {}
    small = []
    for key, kind in first.items():
        (name, box), holders = key, members[kind]
        nbytes = box.numel * tensors[name].torch_dtype.itemsize
        if not nbytes or key not in originals:
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
    return SavePlan(tensors, holdings, kinds, writers)
