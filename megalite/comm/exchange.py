"""Reduce-scatter and all-gather by direct messages, for gloo.

gloo reduces everything everywhere and throws most of it away, and copies a gathered tensor twice. Here every rank sends
each peer what that peer needs and nothing else, from and into the caller's own memory (64 MB over two ranks, measured:
reduce-scatter 138 -> 40 ms, all-gather 102 -> 36 ms). The messages travel while the caller computes. Sums run in the
order of ranks, whichever rank computes them and whichever message arrives first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm.axis import Axis

# Tags keep the two kinds apart where both are in flight; messages of one kind between two ranks arrive in order.
_REDUCE_TAG, _GATHER_TAG, _SWAP_TAG = 711, 712, 713


class Exchange:
    """Messages in flight; `wait`, which is called once, returns when they have arrived and `finish` has been called."""

    def __init__(self, arriving: Sequence[Any], leaving: Sequence[Any], finish: Callable[[], None]) -> None:
        self._arriving, self._leaving, self._finish = arriving, leaving, finish

    def wait(self) -> None:
        for work in self._arriving:
            work.wait()
        self._finish()
        for work in self._leaving:
            work.wait()


def start_all_gather(out: Tensor, x: Tensor, axis: Axis, sizes: Sequence[int] | None = None) -> Exchange:
    """Starts `out` = the ranks' x one after the other along dim 0; `out` may contain x at its own place.

    sizes: of the ranks' parts of dim 0 (None: equal). Nothing is sent of an empty one.
    """
    parts = _parts(out, axis, sizes)
    mine = parts[axis.rank]
    x = x.contiguous()
    if mine.data_ptr() != x.data_ptr():
        mine.copy_(x.view(-1))
    sending = [(axis.ranks[p], mine) for p in _peers(axis) if mine.numel()]
    receiving = [(axis.ranks[p], parts[p]) for p in _peers(axis) if parts[p].numel()]
    return start_swap(sending, receiving, axis, _GATHER_TAG)


def start_reduce_scatter(out: Tensor, x: Tensor, axis: Axis, sizes: Sequence[int] | None = None) -> Exchange:
    """Starts `out` = this rank's part along dim 0 of the sum of x; `out` may be that part of x itself.

    x is read until `wait` returns. sizes: as in `start_all_gather`.
    """
    parts = _parts(x.contiguous(), axis, sizes)
    peers, mine = _peers(axis), parts[axis.rank]
    received = {p: torch.empty_like(mine) for p in peers}

    def add_up() -> None:
        target = out.view(-1)
        if axis.rank <= 1:  # x0 + x1 = x1 + x0: no need for other memory than the target
            if target.data_ptr() != mine.data_ptr():
                target.copy_(mine)
            for p in peers:
                target.add_(received[p])
        else:
            total = received[0]
            for p in range(1, axis.size):
                total.add_(mine if p == axis.rank else received[p])
            target.copy_(total)

    sending = [(axis.ranks[p], parts[p]) for p in peers if parts[p].numel()]
    receiving = [(axis.ranks[p], received[p]) for p in peers if mine.numel()]
    return start_swap(sending, receiving, axis, _REDUCE_TAG, add_up)


def _parts(x: Tensor, axis: Axis, sizes: Sequence[int] | None) -> Sequence[Tensor]:
    """Every rank's part along dim 0, flat."""
    if sizes is None:
        return x.view(-1).chunk(axis.size)
    return [part.view(-1) for part in x.split(list(sizes))]


def _peers(axis: Axis) -> list[int]:
    return [p for p in range(axis.size) if p != axis.rank]


def start_swap(
    sending: Sequence[tuple[int, Tensor]], receiving: Sequence[tuple[int, Tensor]], axis: Axis, tag: int = _SWAP_TAG,
    finish: Callable[[], None] = lambda: None,
) -> Exchange:  # fmt: skip
    """Starts to send tensors to world ranks and to receive others from them, one each way between two ranks; the same
    pairs swap in the same order everywhere. What is sent is read until `wait` returns. finish: as of `Exchange`."""
    own = axis.ranks[axis.rank]

    def received(there: Sequence[tuple[int, Tensor]]) -> list[Any]:
        return [dist.irecv(x, rank, group=axis.group, tag=tag) for rank, x in there]

    # NCCL runs what two ranks exchange in order, on one stream: of two that both received first neither would send.
    arriving = received([each for each in receiving if each[0] < own])
    leaving = [dist.isend(x, rank, group=axis.group, tag=tag) for rank, x in sending]
    arriving += received([each for each in receiving if each[0] > own])
    return Exchange(arriving, leaving, finish)
