"""Collectives over tensors that live on the host: piece by piece, through the device's memory."""

from __future__ import annotations

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


def sum_on_host(full: Tensor, axis: Axis, mover: Mover, *, scatter: bool) -> None:
    """full, on the host = its sum over the ranks; of this rank's slice alone where `scatter`."""
    mover.settle()
    if not scatter:
        sum_anywhere(full, axis, mover)
        return
    rows = full.view(axis.size, -1)
    for begin in range(0, rows.shape[1], PIECE // axis.size) if axis.size > 1 else ():
        part = rows[:, begin : begin + PIECE // axis.size]
        own = torch.empty(part.shape[1], dtype=part.dtype, device=mover.device)
        reduce_scatter_into(own, mover.upload(part).reshape(-1), axis)
        part[axis.rank] = mover.download(own)


def gather_on_host(full: Tensor, axis: Axis, mover: Mover) -> None:
    """full, on the host: the slices of the other ranks come to this rank's."""
    mover.settle()
    rows = full.view(axis.size, -1)
    for begin in range(0, rows.shape[1], PIECE // axis.size):
        part = rows[:, begin : begin + PIECE // axis.size]
        whole = torch.empty(part.shape, dtype=part.dtype, device=mover.device)
        own, arrival = mover.bring(part[axis.rank])  # behind what the device itself has written there
        arrival.wait()
        whole[axis.rank] = own
        all_gather_into(whole.view(-1), whole[axis.rank], axis)
        part.copy_(mover.download(whole))
