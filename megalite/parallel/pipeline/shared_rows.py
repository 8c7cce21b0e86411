"""Tied embeddings of stages that differ: the copies are cut by unlike tensor-parallel sizes and have unlike numbers of
replicas.

Every row is summed by one replica of each end, in one order of all contributions, so both ends get the same bits:

    first stage, tp 1, 2 replicas    rows 0..V/2 are summed by replica 0, the others by replica 1
    last stage, tp 2, 1 replica      rows 0..V/2 by tensor-parallel rank 0, the others by rank 1

A replica leaves zeros where others have summed; the reduction over the stage's replicas that follows adds them up.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.comm import Exchange, Handle, ParallelMesh, device_of, start_swap
from megalite.schedule import StagePlacement


class _Holder(NamedTuple):
    """A rank with a part of a copy: its rows, and those of them that it sums."""

    rank: int
    rows: range
    sums: range


class SharedRows:
    """`start_shared_sum` between the ends of a pipeline whose stages differ. Made by all ranks together.

    shape: of the logical tensor. padded: tensor-parallel size -> its rows with padding.
    """

    def __init__(
        self, mesh: ParallelMesh, placement: StagePlacement, shape: tuple[int, int], padded: Callable[[int], int]
    ) -> None:
        self._axis = mesh.over("pp", apart="tied")
        self._width = shape[1]
        self._holders = _holders(mesh, placement, shape[0], padded)

    def __call__(self, copies: Sequence[Tensor]) -> Handle:
        (full,) = copies
        mine = next(holder for holder in self._holders if holder.rank == self._axis.ranks[self._axis.rank])
        gradient = full[: len(mine.rows) * self._width].view(-1, self._width)
        device = device_of(self._axis)

        def of(rows: range) -> Tensor:
            return gradient[rows.start - mine.rows.start : rows.stop - mine.rows.start]

        parts: list[tuple[range, Tensor]] = []  # of my rows to sum, in the order of the holders
        sending, receiving = [], []
        for other in self._holders:
            wanted, asked = _common(mine.sums, other.rows), _common(other.sums, mine.rows)
            if other == mine:
                parts.append((wanted, of(wanted).clone()))
                continue
            if wanted:
                parts.append((wanted, torch.empty(len(wanted), self._width, dtype=full.dtype, device=device)))
                receiving.append((other.rank, parts[-1][1]))
            if asked:
                sending.append((other.rank, of(asked).to(device)))

        def add_up() -> None:
            full.zero_()
            for rows, part in parts:
                of(rows).add_(part.to(gradient.device))

        return Exchange([start_swap(sending, receiving, self._axis)], [], add_up)


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _holders(mesh: ParallelMesh, placement: StagePlacement, rows: int, padded: Callable[[int], int]) -> list[_Holder]:
    found = []
    for stage in (0, placement.num_stages - 1):
        workers = placement.workers[stage]
        for turn in range(workers):
            ranks = mesh.ranks_of(placement.rank_of(stage, 0, turn))
            each = padded(len(ranks)) // len(ranks)
            for number, rank in enumerate(ranks):
                own = _common(range(number * each, (number + 1) * each), range(rows))
                first, last = (own.start + len(own) * part // workers for part in (turn, turn + 1))
                found.append(_Holder(rank, own, range(first, last)))
    return found
