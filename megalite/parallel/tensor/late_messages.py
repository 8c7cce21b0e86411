"""Messages of the tensor axis that travel while the caller computes something else.

A linear layer hands what it must send, or waits for, to a `Message`. The plain one waits at once. A `LateMessage` is
started in one node of autograd's graph and waited for in another, so that the caller can put the other half of the
micro-batch in between, in the forward and in the backward (Domino, arXiv 2409.15241; Merak, arXiv 2206.04959):

    node         forward                                         backward
    send         starts the gather (sequence parallelism)        waits for the sum of dx
    column       waits for the gather; product                   product; starts the sum of dx; dW
    row          product; starts the sum                         waits for the gather of dy; product; dW
    receive      waits for the sum                               starts the gather of dy (sequence parallelism)

`enter_parallel` and `leave_parallel` do what a column and a row do, without a product: experts lie between them.

Autograd runs the node that was made last first, so a backward is the mirror image of its forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from megalite.comm import (
    Axis,
    Done,
    Handle,
    all_gather,
    all_gather_into,
    all_reduce_,
    conjugates,
    reduce_scatter_into,
    same,
)
from megalite.gradient import into_sink


class Message:
    """What a linear layer sends over its axis, at once.

    sequence: whether activations outside the layer are parts of the sequence (sequence parallelism).
    """

    def send(self, x: Tensor, axis: Axis, *, sequence: bool) -> Tensor:
        """x, in front of the column-parallel layer that gets the same message."""
        return x

    def receive(self, y: Tensor, axis: Axis, *, sequence: bool) -> Tensor:
        """The complete y of the row-parallel layer that got the same message."""
        return y

    def gathered(self, x: Tensor, axis: Axis) -> Tensor:
        """The ranks' x one after the other along dim 0."""
        return all_gather(x, axis)

    def hold(self, handle: Handle) -> None:
        """Takes over a sum that has been started."""
        handle.wait()


class LateMessage(Message):
    """The same, started by the node before or waited for by the node behind. One for each run of a layer."""

    def __init__(self) -> None:
        self._handle: Handle = Done()
        self._whole: Tensor | None = None

    def send(self, x: Tensor, axis: Axis, *, sequence: bool) -> Tensor:
        start = self._start_gather if sequence else same
        return x if axis.size == 1 else conjugates(x, axis, start, self._arrived)

    def receive(self, y: Tensor, axis: Axis, *, sequence: bool) -> Tensor:
        start = self._start_gather if sequence else same
        return y if axis.size == 1 else conjugates(y, axis, self._arrived, start)

    def _start_gather(self, x: Tensor, axis: Axis) -> Tensor:
        """Starts to gather x, for `gathered`."""
        whole = x.new_empty((axis.size * len(x), *x.shape[1:]))
        self._handle, self._whole = all_gather_into(whole, x.contiguous(), axis, async_op=True), whole
        return same(x, axis)

    def _arrived(self, x: Tensor, axis: Axis) -> Tensor:
        self.wait()
        return same(x, axis)

    def gathered(self, x: Tensor, axis: Axis) -> Tensor:
        whole, self._whole = self._whole, None
        assert whole is not None, "a gather that was never started"
        self.wait()
        return whole

    def hold(self, handle: Handle) -> None:
        self._handle = handle

    def wait(self) -> None:
        """Returns when nothing is under way."""
        self._handle.wait()
        self._handle = Done()


def enter_parallel(x: Tensor, message: Message, axis: Axis, *, sequence: bool) -> Tensor:
    """What the ranks of an axis compute parts of: x, or under sequence parallelism the ranks' x along dim 0. The
    gradient is the sum of the ranks' gradients, or this rank's part of it."""
    whole = message.gathered if sequence else same
    return x if axis.size == 1 else conjugates(x, axis, whole, partial(_summed, message, sequence))


def leave_parallel(y: Tensor, message: Message, axis: Axis, *, sequence: bool) -> Tensor:
    """The conjugate: the sum of the ranks' y, or this rank's part of it along dim 0, valid behind `message.receive`."""
    whole = message.gathered if sequence else same
    return y if axis.size == 1 else conjugates(y, axis, partial(_summed, message, sequence), whole)


def _summed(message: Message, sequence: bool, x: Tensor, axis: Axis) -> Tensor:
    own = x if sequence else x.clone(memory_format=torch.contiguous_format)  # the sum is made in place
    total, summing = start_sum(own, axis, sequence=sequence)
    message.hold(summing)
    return total.detach()  # else autograd would see it change when the sum arrives


def start_sum(partial: Tensor, axis: Axis, *, sequence: bool) -> tuple[Tensor, Handle]:
    """The sum over the axis, valid once the handle has been waited for: whole and in place, or this rank's part along
    dim 0 if `sequence`."""
    if not sequence:
        return partial, all_reduce_(partial, axis, async_op=True)
    part = partial.new_empty((len(partial) // axis.size, *partial.shape[1:]))
    return part, reduce_scatter_into(part, partial, axis, async_op=True)


@contextmanager
def added_at_once(module: nn.Module) -> Iterator[None]:
    """Inside, the gradient of every use of the module's own parameters is a contribution by itself, as of a micro-batch
    by itself. (Autograd would first add up the uses of one graph, which rounds differently.)"""
    own = module._parameters
    kept = {name: weight for name, weight in own.items() if weight is not None and weight.requires_grad}
    try:
        for name, weight in kept.items():
            own[name] = into_sink(weight)  # type: ignore[assignment]  # a tensor in a parameter's place
        yield
    finally:
        own.update(kept)
