"""Messages of the tensor axis that travel while the caller computes something else.

A linear layer hands what it must send, or waits for, to a `Message`. The plain one waits at once. A `LateMessage` is
started in one node of autograd's graph and waited for in another, so that the caller can put the other half of the
micro-batch in between, in the forward and in the backward (Domino, arXiv 2409.15241; Merak, arXiv 2206.04959):

    node         forward                                         backward
    send_early   starts the gather (sequence parallelism)        waits for the sum of dx
    column       waits for the gather; product                   product; starts the sum of dx; dW
    row          product; starts the sum                         waits for the gather of dy; product; dW
    receive      waits for the sum                               starts the gather of dy (sequence parallelism)

Autograd runs the node that was made last first, so a backward is the mirror image of its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalite.comm import Axis, Done, Handle, all_gather, all_gather_into
from megalite.gradient import sink_of


class Message:
    """What a linear layer sends over its axis, at once."""

    def gathered(self, x: Tensor, axis: Axis) -> Tensor:
        """The ranks' x one after the other along dim 0."""
        return all_gather(x, axis)

    def leave(self, handle: Handle) -> None:
        """Takes over a sum that has been started."""
        handle.wait()


class LateMessage(Message):
    """The same, started by the node before or waited for by the node behind. One for each run of a layer."""

    def __init__(self) -> None:
        self._handle: Handle = Done()
        self._whole: Tensor | None = None

    def start_gather(self, x: Tensor, axis: Axis) -> None:
        """Starts to gather x, for `gathered`."""
        whole = x.new_empty((axis.size * len(x), *x.shape[1:]))
        self._handle, self._whole = all_gather_into(whole, x.contiguous(), axis, async_op=True), whole

    def gathered(self, x: Tensor, axis: Axis) -> Tensor:
        whole, self._whole = self._whole, None
        assert whole is not None, "a gather that was never started"
        self.wait()
        return whole

    def leave(self, handle: Handle) -> None:
        self._handle = handle

    def wait(self) -> None:
        """Returns when nothing is under way."""
        self._handle.wait()
        self._handle = Done()


class _SendEarly(Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch's own has no type

    @staticmethod
    def forward(ctx: Any, x: Tensor, message: LateMessage, axis: Axis, sequence: bool) -> Tensor:
        ctx.message = message
        if sequence:
            message.start_gather(x, axis)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        ctx.message.wait()
        return dx, None, None, None


class _Receive(Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch's own has no type

    @staticmethod
    def forward(ctx: Any, y: Tensor, message: LateMessage, axis: Axis, sequence: bool) -> Tensor:
        ctx.message, ctx.axis, ctx.sequence = message, axis, sequence
        message.wait()
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sequence:
            ctx.message.start_gather(dy, ctx.axis)
        return dy, None, None, None


def send_early(x: Tensor, message: LateMessage, axis: Axis, *, sequence: bool) -> Tensor:
    """x, in front of the column-parallel layer that gets the same message."""
    return _SendEarly.apply(x, message, axis, sequence)


def receive(y: Tensor, message: LateMessage, axis: Axis, *, sequence: bool) -> Tensor:
    """The complete y of the row-parallel layer that got the same message."""
    return _Receive.apply(y, message, axis, sequence)


class _IntoSink(Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch's own has no type

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.sink = sink_of(weight)
        return weight.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor | None:
        if ctx.sink is None:
            return gradient
        ctx.sink.add(gradient)
        return None


@contextmanager
def added_at_once(module: nn.Module) -> Iterator[None]:
    """Inside, the gradient of every use of the module's own parameters is a contribution by itself, as of a micro-batch
    by itself. (Autograd would first add up the uses of one graph, which rounds differently.)"""
    own = module._parameters
    kept = {name: weight for name, weight in own.items() if weight is not None and weight.requires_grad}
    try:
        for name, weight in kept.items():
            own[name] = _IntoSink.apply(weight)  # type: ignore[assignment]  # a tensor in a parameter's place
        yield
    finally:
        own.update(kept)
