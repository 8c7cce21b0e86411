"""A bucket: a contiguous piece of a stage's parameters and gradients, and its reduction over the data-parallel ranks.

    stage 0      full gradient            all-reduce; every rank owns all of it
    stage 1      full gradient            reduce-scatter; this rank owns one slice of it
    stage 2, 3   scratch while needed     reduce-scatter after every micro-batch, added into the owned slice

The sum is plain: the factor 1 / (micro-batches * data-parallel size) is in the loss already.

Between a batch's step and the first backward of the next nobody needs a gradient. With one micro-batch this is while
the activations grow, so stages 2 and 3 give its memory back for that time (`release`); with more it stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.comm import Axis, Handle, all_reduce_, reduce_scatter_into
from megalite.gradient import GradSink
from megalite.inventory import BucketPlan
from megalite.parallel.zero.host_memory import give_back_freed_memory
from megalite.parallel.zero.unshard import BucketWeights


class ScratchPool:
    """Memory for gradients that live only until they are reduced: taken and given back many times in a batch, and
    returned to the allocator at its end, so that the next forward can have it.

    All stages of a rank share one pool, and one reduction at a time is under way in it: a piece that fills and a piece
    that travels are all there is (a test asserts it).
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.flying: Bucket | None = None
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


class StreamingSink(GradSink):
    """The sink of stages 2 and 3: ready as soon as one micro-batch's worth has arrived; what comes before the reduction
    starts joins it.

    A split backward brings the gradients of norms with the input's, and those of matrices a few micro-batches later:
    sums do not mind. But a vector must not open its bucket so early, or all buckets of a stage would be in memory at
    once: it waits beside it. And what it was ahead counts for the rounds to come, or the last rounds would never be
    complete.
    """

    __slots__ = ("bucket", "seen", "waiting")

    def __init__(self, bucket: Bucket, *, uses: int, on_ready: Callable[[], None] | None) -> None:
        super().__init__(uses=uses, on_ready=on_ready, on_open=bucket.open)
        self.bucket = bucket
        self.seen = 0
        self.waiting: Tensor | None = None

    @property
    def grad(self) -> Tensor:
        if self.waiting is not None:
            self.bucket.open()
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
        if gradient.dim() > 1 or self.bucket.has_scratch:
            super().add(gradient)
            return
        gradient = gradient.to(self.bucket.dtype)
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


@dataclass
class _Kept:
    """A gradient of a bucket that is not the selected one: its memory, its sinks' states, its reduction."""

    full: Tensor | None
    sinks: list[tuple[Tensor, bool, int | None]]
    missing: int
    launched: bool
    handle: Handle | None


class Bucket:
    """Runtime of one `BucketPlan`.

    An asynchronous pipeline accumulates the gradient of one update while that of the update before is being reduced:
    a held bucket can have several gradients, of which one is selected.

    weights[v]: the parameters of the bucket in weight version v.
    gradient: the owned slice of the gradient (all of it in stage 0), valid after `finish`.
    pool: where the scratch of a bucket that is reduced after every micro-batch comes from (None: the full gradient is
    held, stages 0 and 1, tied parameters in any stage). keep: the gradient stays in memory between batches.
    """

    def __init__(
        self,
        plan: BucketPlan,
        *,
        stage: int,
        axis: Axis,
        dtype: torch.dtype,
        device: torch.device,
        pool: ScratchPool | None,
        keep: bool,
    ) -> None:
        self.plan = plan
        self.stage = stage
        self.axis = axis
        self.dtype = dtype
        self.owned_start, self.owned_stop = plan.slice_of(axis.rank, axis.size) if stage else (plan.start, plan.stop)
        self.weights: list[BucketWeights] = []
        self.sinks: list[GradSink] = []
        self.missing = 0
        self.launched = False
        self.handle: Handle | None = None
        self._nothing = torch.empty(0, dtype=dtype, device=device)
        self._full: Tensor | None = None
        self._gradient: Tensor | None = None
        self._arriving: Tensor = self._nothing
        self._pool = pool
        self.keep = keep
        self._scratch: Tensor | None = None
        self._flying: Tensor | None = None
        self._accumulated = False
        self._kept: list[_Kept | None] = [None]
        self._selected = 0

    def add_gradient(self) -> None:
        """One more gradient, of another update; it is not selected."""
        self._kept.append(_Kept(None, [(self._nothing, True, None) for _ in self.sinks], len(self.sinks), False, None))

    def select(self, index: int) -> None:
        """Everything below works on gradient number `index` from here on; the sinks stay the same objects."""
        if index == self._selected:
            return
        states = [(sink.buffer, sink.fresh, sink.remaining) for sink in self.sinks]
        self._kept[self._selected] = _Kept(self._full, states, self.missing, self.launched, self.handle)
        self._selected, kept = index, self._kept[index]
        assert kept is not None
        self._full = kept.full
        self._gradient = None if kept.full is None else self._owned(kept.full)
        self.missing, self.launched, self.handle = kept.missing, kept.launched, kept.handle
        for sink, (buffer, fresh, remaining) in zip(self.sinks, kept.sinks, strict=True):
            sink.buffer, sink.fresh, sink.remaining = buffer, fresh, remaining

    @property
    def numel(self) -> int:
        return self.plan.stop - self.plan.start

    @property
    def streams(self) -> bool:
        """Reduced after every micro-batch; the full gradient is scratch."""
        return self._pool is not None

    @property
    def full(self) -> Tensor:
        """The gradient of this rank's micro-batches, before the reduction."""
        assert self._full is not None, "the bucket's gradient is not in memory"
        return self._full

    @property
    def gradient(self) -> Tensor:
        """The owned slice of the reduced gradient; zero where there is none yet."""
        if self._gradient is None and self.streams:
            self._gradient = self._nothing.new_zeros(self.owned_stop - self.owned_start)
        elif self._gradient is None:
            self.open()
            self.full.zero_()
        assert self._gradient is not None
        return self._gradient

    def held(self) -> list[Tensor]:
        """The gradients that are in memory now, scratch excepted."""
        others = [kept.full for kept in self._kept if kept is not None]
        return [t for t in (self._gradient if self.streams else self._full, *others) if t is not None]

    def release(self) -> None:
        """Gives the memory of the gradient back until something arrives."""
        self._full = self._gradient = None
        self._arriving = self._nothing
        for sink in self.sinks:
            sink.buffer = self._nothing

    def _owned(self, full: Tensor) -> Tensor:
        return full[self.owned_start - self.plan.start : self.owned_stop - self.plan.start]

    def begin_batch(self, microbatches: int | None) -> None:
        """Forgets the last batch's gradient. microbatches: how many will contribute (None: `arm` says when the last one
        comes)."""
        assert self._scratch is None and self.handle is None, "the last batch was never finished"
        self.launched, self._accumulated = False, False
        if not self.keep:
            self.release()
        self._reopen()
        if microbatches is not None:
            for sink in self.sinks:
                sink.expect(sink.uses * microbatches)

    def arm(self) -> None:
        for sink in self.sinks:
            sink.arm()

    def open(self) -> None:
        """Makes the memory of the full gradient, uninitialised; called by the first sink that receives something."""
        if self._full is not None:
            return
        if self._pool is None:
            self._full = self._nothing.new_empty(self.numel)
            self._gradient = self._owned(self._full)
        else:
            self.finish()
            self._scratch = self._pool.take(self.numel)
            self._full = self._scratch[: self.numel]
        for sink, slot in zip(self.sinks, self.plan.slots, strict=True):
            begin = slot.start - self.plan.start
            sink.settle(self._full[begin : begin + slot.entry.numel].view(slot.entry.shape))
        self._zero_gaps()

    @property
    def has_scratch(self) -> bool:
        """Whether the memory of a streaming bucket exists now."""
        return self._scratch is not None

    @property
    def opened(self) -> bool:
        """Something has arrived that is not reduced yet."""
        return any(sink.received for sink in self._streaming_sinks)

    @property
    def _streaming_sinks(self) -> list[StreamingSink]:
        return [sink for sink in self.sinks if isinstance(sink, StreamingSink)]

    def close(self) -> None:
        """Parameters that received nothing count as zero."""
        self.open()
        for sink in self.sinks:
            if sink.fresh:
                _ = sink.grad

    def launch(self, *, async_op: bool) -> None:
        """Starts the reduction of what has arrived. A streaming bucket may be filled again at once (with other
        scratch), after the one that is under way has landed."""
        if self._pool is not None:
            self._pool.land()
        self.close()
        self.launched = True
        if self.stage == 0:
            self.handle = all_reduce_(self.full, self.axis, async_op=async_op)
            return
        self._arriving = self._owned(self.full)
        self.handle = reduce_scatter_into(self._arriving, self.full, self.axis, async_op=async_op)
        if self._pool is not None:
            self._flying, self._scratch, self._full = self._scratch, None, None
            self._pool.flying = self
            self._next_round()

    def finish(self) -> None:
        """Waits for what was launched; a streaming bucket adds what arrived to its gradient and gives its scratch
        back."""
        if self.handle is None:
            return
        self.handle.wait()
        self.handle = None
        if self._pool is None or self._flying is None:
            return
        if self._gradient is None:
            self._gradient = self._arriving.clone()
        elif self._accumulated:
            self._gradient.add_(self._arriving)
        else:
            self._gradient.copy_(self._arriving)
        self._accumulated = True
        self._pool.give(self._flying)
        self._flying = self._pool.flying = None
        self._arriving = self._nothing  # a view of the scratch would keep it alive

    def finish_batch(self) -> None:
        """Waits; a streaming bucket that never received anything has gradient zero."""
        self.finish()
        if self._pool is not None and not self._accumulated:
            self.gradient.zero_()

    def _next_round(self) -> None:
        sinks = self._streaming_sinks
        complete = min(sink.seen // sink.uses for sink in sinks)
        for sink in sinks:
            sink.next_round(complete)
            sink.buffer = self._nothing  # a view of the scratch would keep it alive
        self.missing = sum(sink.seen < sink.uses for sink in sinks)

    def _reopen(self) -> None:
        self.missing = len(self.sinks)
        for sink in self.sinks:
            sink.reopen()

    def _zero_gaps(self) -> None:
        at = self.plan.start
        for slot in self.plan.slots:
            self.full[at - self.plan.start : slot.start - self.plan.start].zero_()
            at = slot.stop
        self.full[at - self.plan.start :].zero_()
