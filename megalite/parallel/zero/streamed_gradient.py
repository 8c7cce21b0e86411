"""The gradient of a bucket of which every rank keeps its slice only: stages 2 and 3.

The whole gradient of a micro-batch lives in scratch, which all buckets of a rank share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.comm import Handle, reduce_scatter_into
from megalite.gradient import GradSink
from megalite.parallel.zero.bucket import Bucket
from megalite.parallel.zero.host_memory import give_back_freed_memory


class StreamedGradient:
    """Every micro-batch is reduced by itself, and added to the slice that this rank owns.

        empty --open: takes scratch--> filling --launch: reduce-scatter--> travelling --finish--> added to the slice
          ^                               ^                                                              |
          |                               '----------------- the next micro-batch, in other scratch -----+
          '-------------------------------------------- begin_batch -------------------------------------'

    Filling and travelling overlap: a bucket may be filled again at once, in other scratch.

    keep: the slice stays in memory between batches. With one micro-batch nobody needs it from the step to the next
    backward, which is while the activations grow: then it is given back for that time.
    """

    streams = True

    def __init__(self, bucket: Bucket, pool: ScratchPool, *, keep: bool) -> None:
        self.bucket, self.keep = bucket, keep
        self.missing = 0
        self.handle: Handle | None = None
        self._pool = pool
        self._filling: Tensor | None = None
        self._travelling: Tensor | None = None
        self._slice: Tensor | None = None
        self._slice_is_of_this_batch = False

    @property
    def full(self) -> Tensor:
        assert self._filling is not None, "the bucket's gradient is not in memory"
        return self._filling[: self.bucket.numel]

    @property
    def reduced(self) -> Tensor:
        if self._slice is None:
            self._slice = self.bucket.nothing.new_zeros(self.bucket.owned_stop - self.bucket.owned_start)
        return self._slice

    @property
    def held(self) -> Tensor | None:
        return self._slice

    @property
    def has_scratch(self) -> bool:
        return self._filling is not None

    @property
    def needs_reduction(self) -> bool:
        return any(sink.received for sink in self._sinks)

    @property
    def _sinks(self) -> list[StreamingSink]:
        return [sink for sink in self.bucket.sinks if isinstance(sink, StreamingSink)]

    def begin_batch(self) -> None:
        assert self._filling is None, "the last batch was never finished"
        self._slice_is_of_this_batch = False
        if not self.keep:
            self._slice = None
            self.bucket.forget_memory()

    def open(self) -> None:
        if self._filling is None:
            self.finish()
            self._filling = self._pool.take(self.bucket.numel)
            self.bucket.fill_into(self.full)

    def launch(self, *, async_op: bool) -> None:
        self._pool.land()
        self.bucket.close()
        full = self.full
        self.handle = reduce_scatter_into(self.bucket.owned(full), full, self.bucket.axis, async_op=async_op)
        self._travelling, self._filling = self._filling, None
        self._pool.flying = self
        self._next_round()

    def finish(self) -> None:
        if self.handle is None or self._travelling is None:
            return
        self.handle.wait()
        self.handle = None
        arrived = self.bucket.owned(self._travelling[: self.bucket.numel])
        if self._slice is None:
            self._slice = arrived.clone()
        elif self._slice_is_of_this_batch:
            self._slice.add_(arrived)
        else:
            self._slice.copy_(arrived)
        self._slice_is_of_this_batch = True
        self._pool.give(self._travelling)
        self._travelling = self._pool.flying = None

    def finish_batch(self) -> None:
        self.finish()
        if not self._slice_is_of_this_batch:  # nothing was ever received
            self.reduced.zero_()

    def _next_round(self) -> None:
        sinks = self._sinks
        complete = min(sink.seen // sink.uses for sink in sinks)
        for sink in sinks:
            sink.next_round(complete)
        self.bucket.forget_memory()  # a view of the scratch would keep it alive
        self.missing = sum(sink.seen < sink.uses for sink in sinks)


class StreamingSink(GradSink):
    """The sink of a `StreamedGradient`: ready as soon as one micro-batch's worth has arrived; what comes before the
    reduction starts joins it.

    A split backward brings the gradients of norms with the input's, and those of matrices a few micro-batches later:
    sums do not mind. But a vector must not open its bucket so early, or all buckets of a stage would be in memory at
    once: it waits beside it. And what it was ahead counts for the rounds to come, or the last rounds would never be
    complete.
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
        """Something has arrived that is not reduced yet."""
        return not self.fresh or self.waiting is not None

    def reopen(self) -> None:
        super().reopen()
        self.seen = 0

    def next_round(self, complete: int) -> None:
        """What has arrived is being reduced, `complete` micro-batches and perhaps a part of more."""
        super().reopen()
        self.seen -= complete * self.uses

    def expect(self, contributions: int) -> None:
        """Nothing to count: every micro-batch is reduced by itself."""

    def add(self, gradient: Tensor) -> None:
        if gradient.dim() > 1 or self.gradient.has_scratch:
            super().add(gradient)
            return
        gradient = gradient.to(self.gradient.bucket.gradient_dtype)
        self.waiting = gradient if self.waiting is None else self.waiting + gradient
        self.done()

    def settle(self, buffer: Tensor) -> None:
        super().settle(buffer)
        if self.waiting is not None:
            self.buffer.copy_(self.waiting)
            self.fresh, self.waiting = False, None

    def done(self) -> None:
        self.seen += 1
        if self.seen == self.uses and self.on_ready is not None:
            self.on_ready()


class ScratchPool:
    """Memory for gradients that live only until they are reduced: taken and given back many times in a batch, and
    returned to the allocator at its end, so that the next forward can have it.

    All stages of a rank share one pool, and one reduction at a time is under way in it (`flying`): a piece that fills
    and a piece that travels are all there is (a test asserts it).
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.flying: StreamedGradient | None = None
        self.most_bytes = 0
        self._bytes = 0
        self._free: list[Tensor] = []

    def take(self, numel: int) -> Tensor:
        """At least `numel` elements, uninitialised."""
        for place, piece in enumerate(self._free):
            if piece.numel() >= numel:
                return self._free.pop(place)
        if self._free:  # too small: they would only lie beside the new piece
            self.release()
            give_back_freed_memory(self.device)
        piece = torch.empty(numel, dtype=self.dtype, device=self.device)
        self._bytes += piece.nbytes
        self.most_bytes = max(self.most_bytes, self._bytes)
        return piece

    def give(self, piece: Tensor) -> None:
        self._free.append(piece)

    def land(self) -> None:
        """Returns when no reduction is under way."""
        if self.flying is not None:
            self.flying.finish()

    def release(self) -> None:
        """Forgets what is not in use."""
        self._bytes -= sum(piece.nbytes for piece in self._free)
        self._free.clear()
