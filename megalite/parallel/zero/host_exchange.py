"""Collectives over tensors that live on the host: piece by piece, through the device's memory."""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalite.comm import Axis, all_gather_into, all_reduce_, reduce_scatter_into
from megalite.parallel.tiers import Mover

PIECE = 16 << 20
"""Elements that ranks exchange at a time."""


def sum_anywhere(x: Tensor, axis: Axis, mover: Mover) -> None:
    """x, on the device or the host = its sum over the ranks."""
    if x.device == mover.device or axis.size == 1:
        all_reduce_(x, axis)
        return
    mover.settle()
    for part in x.split(PIECE):
        there = mover.upload(part)
        all_reduce_(there, axis)
        part.copy_(mover.download(there))


def sum_on_host(full: Tensor, axis: Axis, mover: Mover, sizes: Sequence[int] | None) -> None:
    """full, on the host = its sum over the ranks; of this rank's slice alone where `sizes` says how many elements each
    rank owns."""
    mover.settle()
    if sizes is None:
        sum_anywhere(full, axis, mover)
        return
    for part, owned in _pieces(full, sizes) if axis.size > 1 else ():
        mine = owned[axis.rank]
        own = torch.empty(len(mine), dtype=part.dtype, device=mover.device)
        reduce_scatter_into(own, mover.upload(part).reshape(-1), axis, sizes=[len(each) for each in owned])
        mine.copy_(mover.download(own))


def gather_on_host(full: Tensor, axis: Axis, sizes: Sequence[int], mover: Mover) -> None:
    """full, on the host: the slices of the other ranks come to this rank's. sizes: elements of each slice."""
    mover.settle()
    for part, owned in _pieces(full, sizes):
        shares = [len(each) for each in owned]
        whole = torch.empty(part.shape, dtype=part.dtype, device=mover.device)
        own, arrival = mover.bring(owned[axis.rank])  # behind what the device itself has written there
        arrival.wait()
        there = whole.view(-1).split(shares)[axis.rank].copy_(own)
        all_gather_into(whole.view(-1), there, axis, sizes=shares)
        part.copy_(mover.download(whole))


def _pieces(full: Tensor, sizes: Sequence[int]) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
    """(At most `PIECE` elements of `full`; what each rank owns of them.) Equal slices are exchanged side by side, so
    that every piece is equal, too."""
    if len(set(sizes)) == 1:
        rows = full.view(len(sizes), -1)
        for columns in rows.split(PIECE // len(sizes), 1):
            yield columns, columns.unbind()
        return
    begin, ends = 0, list(itertools.accumulate(sizes, initial=0))
    for part in full.split(PIECE):
        bounds = [min(max(end - begin, 0), len(part)) for end in ends]
        yield part, [part[start:stop] for start, stop in itertools.pairwise(bounds)]
        begin += len(part)
