"""The gradient of a bucket of which every rank keeps only its slice: stages 2 and 3."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.gradient import GradSink
from megalite.inventory import ParameterRange
from megalite.parallel.zero.bucket import Bucket, BucketGradient
from megalite.parallel.zero.host_memory import give_back_freed_memory


class StreamedGradient(BucketGradient):
    """Every micro-batch is reduced by itself and added to the slice that this rank owns.

        empty --open: takes scratch--> filling --launch: reduce-scatter--> reducing --finish--> added to the slice
          ^                               ^                                                            |
          |                               '----------------- the next micro-batch, in other scratch ---+
          '-------------------------------------------- begin_batch -----------------------------------'

    keep: the slice stays in memory between batches. Otherwise it is freed from the step to the next backward, which is
        when activations need memory; a batch of one micro-batch allows that.
    """

    streams = True

    def __init__(self, bucket: Bucket, pool: ScratchPool, *, keep: bool) -> None:
        super().__init__(bucket, keep=keep)
        self._pool = pool
        self.filling: Tensor | None = None
        self._reducing: Tensor | None = None
        self._slice: Tensor | None = None
        self._slice_is_valid = self._ends = False

    @property
    def full(self) -> Tensor:
        assert self.filling is not None, "the bucket's gradient is not in memory"
        return self.filling[: self.bucket.numel]

    @property
    def reduced(self) -> Tensor:
        if self._slice is None:
            self._slice = self.bucket.empty.new_zeros(self.bucket.owned_stop - self.bucket.owned_start)
        return self._slice

    @property
    def needs_reduction(self) -> bool:
        return any(sink.received for sink in self._sinks)

    @property
    def _sinks(self) -> list[StreamingSink]:
        return [sink for sink in self.bucket.sinks if isinstance(sink, StreamingSink)]

    def sink(self, range_: ParameterRange, *, uses: int, on_ready: Callable[[], None]) -> GradSink:
        return StreamingSink(self, uses=uses, on_ready=on_ready)

    def begin_batch(self) -> None:
        assert self.filling is None, "the last batch was never finished"
        super().begin_batch()
        self._slice_is_valid = self._ends = False
        if not self.keep:
            self._slice = None
            self.bucket.forget_memory()

    def open(self) -> None:
        if self.filling is None:
            self.finish()
            self.filling = self._pool.take(self.bucket.numel)
            self.bucket.fill_into(self.full)

    def launch(self, *, async_op: bool) -> None:
        self._pool.wait()
        self.open()
        self.bucket.zero_unused()
        full, bucket, sinks = self.full, self.bucket, self._sinks
        own, sizes = full[bucket.owned], bucket.plan.sizes
        self.handle = bucket.reduce_scatter(own, full, bucket.axis, sizes=sizes, async_op=async_op)
        self._ends = async_op and all(sink.remaining == 0 for sink in sinks)
        self._reducing, self.filling = self.filling, None
        self._pool.in_flight = self
        complete = min(sink.seen // sink.uses for sink in sinks)  # micro-batches; parts of later ones are reduced, too
        for sink in sinks:
            sink.fresh = True
            sink.seen -= complete * sink.uses
        bucket.forget_memory()  # a view of the scratch would keep it alive
        self.missing = sum(sink.seen < sink.uses for sink in sinks)

    def finish(self) -> None:
        super().finish()
        if self._reducing is None:
            return
        self._add(self._reducing[self.bucket.owned], self._reducing)
        self._slice_is_valid = True
        self._reducing = self._pool.in_flight = None
        if self._ends and self.bucket.further:
            self.follow(async_op=True)

    def _add(self, arrived: Tensor, piece: Tensor) -> None:
        """Adds what has arrived to the slice, and gives its memory back."""
        if self._slice is None:
            self._slice = arrived.clone()
        elif self._slice_is_valid:
            self._slice.add_(arrived)
        else:
            self._slice.copy_(arrived)
        self._pool.give_back(piece)

    def finish_batch(self) -> None:
        self.finish()
        if not self._slice_is_valid:  # nothing has arrived in this batch
            self.reduced.zero_()


class StreamingSink(GradSink):
    """The sink of a `StreamedGradient`. It is ready once the contributions of one micro-batch have arrived; what
    arrives before the reduction starts is reduced with them.

    In a split backward (zero bubble), gradients of norms arrive a few micro-batches ahead of those of matrices. Such a
    vector must not open its bucket, or all buckets of a stage would be in memory at once: it is kept in `waiting`. And
    contributions of later micro-batches count for later rounds.

    gradient: of the bucket.
    seen: contributions that have arrived and do not belong to a finished round.
    waiting: the sum of vectors that arrived before the bucket was open.
    """

    __slots__ = ("gradient", "seen", "waiting")

    def __init__(self, gradient: StreamedGradient, *, uses: int, on_ready: Callable[[], None] | None) -> None:
        super().__init__(uses=uses, on_ready=on_ready, on_open=gradient.open)
        self.gradient = gradient
        self.seen = 0
        self.waiting: Tensor | None = None

    @property
    def grad(self) -> Tensor:
        if self.waiting is not None:
            self.gradient.open()
        return super().grad

    @property
    def received(self) -> bool:
        """Whether it holds contributions that have not been reduced yet."""
        return not self.fresh or self.waiting is not None

    def reopen(self) -> None:
        super().reopen()
        self.seen = 0

    def expect(self, contributions: int) -> None:
        """Every micro-batch is reduced by itself; which is the last matters only to what follows the reduction."""
        self.remaining = contributions

    def add(self, gradient: Tensor) -> None:
        if gradient.dim() > 1 or self.gradient.filling is not None:
            super().add(gradient)
            return
        gradient = gradient.to(self.gradient.bucket.gradient_dtype)
        self.waiting = gradient if self.waiting is None else self.waiting + gradient
        self.done()

    def use_buffer(self, buffer: Tensor) -> None:
        super().use_buffer(buffer)
        if self.waiting is not None:
            self.buffer.copy_(self.waiting)
            self.fresh, self.waiting = False, None

    def done(self) -> None:
        self.seen += 1
        if self.remaining:
            self.remaining -= 1
        if self.seen == self.uses and self.on_ready is not None:
            self.on_ready()


class ScratchPool:
    """Memory for gradients until they are reduced; at the end of a batch it goes back to the allocator.

    All stages of a rank share one pool, with one reduction in flight at a time. So there are never more than two
    pieces, one being filled and one being reduced (a test asserts it).
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.in_flight: StreamedGradient | None = None
        self._bytes = 0
        self._free: list[Tensor] = []

    def take(self, numel: int) -> Tensor:
        """At least `numel` elements, uninitialised."""
        for place, piece in enumerate(self._free):
            if piece.numel() >= numel:
                return self._free.pop(place)
        if self._free:  # too small: they would only take memory beside the new piece
            self.release()
            give_back_freed_memory(self.device)
        piece = torch.empty(numel, dtype=self.dtype, device=self.device)
        self._bytes += piece.nbytes
        return piece

    def give_back(self, piece: Tensor) -> None:
        self._free.append(piece)

    def wait(self) -> None:
        """Returns when no reduction is in flight."""
        if self.in_flight is not None:
            self.in_flight.finish()

    def release(self) -> None:
        """Returns to the allocator what is not in use."""
        self._bytes -= sum(piece.nbytes for piece in self._free)
        self._free.clear()
