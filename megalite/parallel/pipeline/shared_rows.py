"""Tied embeddings of stages that differ: the copies are cut by unlike tensor-parallel sizes and have unlike numbers of
replicas.

Every row is summed by one replica of each end, in one order of all contributions, so both ends get the same bits:

    first stage, tp 1, 2 replicas    rows 0..V/2 are summed by replica 0, the others by replica 1
    last stage, tp 2, 1 replica      rows 0..V/2 by tensor-parallel rank 0, the others by rank 1

A replica leaves zeros where others have summed; the reduction over the stage's replicas that follows adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.comm import Done, Exchange, Handle, ParallelMesh, device_of, start_swap
from megalite.schedule import StagePlacement


class _Holder(NamedTuple):
    """A rank with a part of a copy: its rows, and those of them that it sums."""

    rank: int
    begin: int
    end: int
    first: int
    last: int


class SharedRows:
    """`SharedGradient` between the ends of a pipeline whose stages differ. Made by all ranks together.

    shape: of the logical tensor. padded: tensor-parallel size -> its rows with padding.
    """

    def __init__(
        self, mesh: ParallelMesh, placement: StagePlacement, shape: tuple[int, int], padded: Callable[[int], int]
    ) -> None:
        self._axis, self._width = mesh.over("pp", apart="tied"), shape[1]
        self._holders = _holders(mesh, placement, shape[0], padded)
        self._mine = next((holder for holder in self._holders if holder.rank == mesh.rank), None)

    def start_sum(self, local_copies: Sequence[Tensor]) -> Handle:
        """Starts to sum the gradient; the result is there once the handle has been waited for."""
        if not local_copies:
            return Done()
        (full,) = local_copies
        mine = self._mine
        assert mine is not None, "a rank between the ends holds no copy"
        gradient = full[: (mine.end - mine.begin) * self._width].view(-1, self._width)
        device = device_of(self._axis)
        parts: list[tuple[int, Tensor]] = []  # of my rows to sum, in the order of the holders: where they begin
        sending, receiving = [], []
        for other in self._holders:
            begin, end = max(mine.first, other.begin), min(mine.last, other.end)
            if other == mine:
                parts.append((mine.first, gradient[mine.first - mine.begin : mine.last - mine.begin].clone()))
            elif begin < end:
                parts.append((begin, torch.empty(end - begin, self._width, dtype=full.dtype, device=device)))
                receiving.append((other.rank, parts[-1][1]))
            begin, end = max(other.first, mine.begin), min(other.last, mine.end)
            if other != mine and begin < end:
                sending.append((other.rank, gradient[begin - mine.begin : end - mine.begin].to(device)))
        return _RowSum(start_swap(sending, receiving, self._axis), full, gradient, parts, mine)


class _RowSum(NamedTuple):
    """A sum in flight."""

    messages: Exchange
    full: Tensor
    gradient: Tensor
    parts: list[tuple[int, Tensor]]
    mine: _Holder

    def wait(self) -> None:
        self.messages.wait()
        self.full.zero_()
        for begin, part in self.parts:
            first = begin - self.mine.begin
            self.gradient[first : first + len(part)] += part.to(self.gradient.device)


def _holders(mesh: ParallelMesh, placement: StagePlacement, rows: int, padded: Callable[[int], int]) -> list[_Holder]:
    found = []
    for stage in (0, placement.num_stages - 1):
        workers = placement.workers[stage]
        for turn in range(workers):
            ranks = mesh.ranks_of(placement.rank_of(stage, 0, turn))
            each = padded(len(ranks)) // len(ranks)
            for number, rank in enumerate(ranks):
                begin, end = min(number * each, rows), min((number + 1) * each, rows)
                share = [begin + (end - begin) * part // workers for part in (turn, turn + 1)]
                found.append(_Holder(rank, begin, end, *share))
    return found
