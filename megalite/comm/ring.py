"""Passing a tensor to the next rank of an axis while the one of the rank before arrives."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm.axis import Axis
from megalite.comm.collectives import device_of

# Two kinds of messages may be in flight at once: what travels round the ring, and the gradient that follows it.
_TAGS = (721, 722)


class Shift:
    """A tensor in flight to the next rank, and the one that arrives from the previous rank."""

    def __init__(self, sent: Tensor, received: Tensor, works: list[Any], axis: Axis, device: torch.device) -> None:
        self._sent, self._received, self._works = sent, received, works
        self._axis, self._device = axis, device

    def wait(self) -> Tensor:
        """Returns what has arrived; the tensor that was sent may change again."""
        with self._axis.waits:
            for work in self._works:
                work.wait()
        return self._received.to(self._device)


def start_shift(x: Tensor, axis: Axis, *, gradient: bool = False) -> Shift:
    """Starts sending x to the next rank of the axis (of two or more) and receiving as much from the one before. All
    ranks of the axis call it in the same order; x must not change until `wait`."""
    device, tag = x.device, _TAGS[gradient]
    x = x.contiguous().to(device_of(axis))  # gloo reads and writes host memory
    received = torch.empty_like(x)
    if axis.group is None:  # nobody is there (`make_axis`)
        return Shift(x, received, [], axis, device)
    to, source = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[(axis.rank - 1) % axis.size]
    pair = [
        dist.P2POp(dist.isend, x, to, group=axis.group, tag=tag),
        dist.P2POp(dist.irecv, received, source, group=axis.group, tag=tag),
    ]
    return Shift(x, received, dist.batch_isend_irecv(pair), axis, device)


Parts = Callable[[list[int]], list[list[int]]]


def neighbours(ranks: list[int], length: int) -> list[list[int]]:
    """The ranks in runs of `length`."""
    return [ranks[i : i + length] for i in range(0, len(ranks), length)]
