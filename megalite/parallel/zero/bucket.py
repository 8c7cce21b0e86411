"""A bucket: a contiguous part of a family's flat memory; one message gathers its weights or reduces its gradient.

plan         [ layers.3.a | layers.3.b | gap ]     elements start .. stop of the family
             [ rank 0     | rank 1           ]     what each rank owns of them (stage 0: all)
weights      one `BucketWeights` (or `HostHome`) per weight version
gradients    one `HeldGradient` per update in flight (stages 0 and 1; tied parameters in any stage), or one
             `StreamedGradient` (stages 2 and 3); the parameters' sinks fill the selected one
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from megalite.comm import Axis, Handle, all_reduce_, reduce_scatter_into
from megalite.gradient import GradSink
from megalite.inventory import BucketPlan, BucketSegment, ParameterRange

if TYPE_CHECKING:
    from megalite.parallel.zero.host_weights import HostHome
    from megalite.parallel.zero.unshard import BucketWeights


class Bucket:
    """One `BucketPlan` on this rank.

    axis: the ranks that own the slices.
    sharded: whether this rank owns one slice (stages 1 to 3) or everything (stage 0).
    owned_start, owned_stop: what it owns, in elements of the family. owned: in elements of the bucket.
    further: axes over which the owned slice is summed after its own: the ranks that hold copies of it.
    empty: a tensor of no elements in the gradient's dtype: the buffer of sinks whose memory has been freed.
    sinks: of the parameters, in the plan's order.
    """

    def __init__(
        self, plan: BucketPlan, *, axis: Axis, sharded: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.plan, self.axis, self.sharded = plan, axis, sharded
        self.numel, self.gradient_dtype = plan.stop - plan.start, dtype
        self.further: Sequence[Axis] = ()
        self.owned_start, self.owned_stop = plan.slice_of(axis.rank) if sharded else (plan.start, plan.stop)
        self.owned = slice(self.owned_start - plan.start, self.owned_stop - plan.start)
        self.reduce_scatter: Callable[..., Handle] = reduce_scatter_into  # of every micro-batch
        self.empty = torch.empty(0, dtype=dtype, device=device)
        self.weights: list[BucketWeights | HostHome] = []
        self.sinks: list[GradSink] = []
        self.gradients: Sequence[BucketGradient] = ()
        self.selected = 0
        self._sink_states: dict[int, list[tuple[Tensor, bool, int | None]]] = {}

    def weights_of(self, version: int) -> BucketWeights | HostHome:
        """The memory of weight version `version`, a number of updates: the newest `len(weights)` of them exist."""
        return self.weights[version % len(self.weights)]

    @property
    def gradient(self) -> BucketGradient:
        """The gradient of the selected update."""
        return self.gradients[self.selected]

    def select(self, index: int) -> None:
        """From now on everything works on gradient number `index`; the sinks stay the same objects."""
        self._sink_states[self.selected] = [(sink.buffer, sink.fresh, sink.remaining) for sink in self.sinks]
        self.selected = index
        untouched = [(self.empty, True, None)] * len(self.sinks)
        for sink, state in zip(self.sinks, self._sink_states.get(index, untouched), strict=True):
            sink.buffer, sink.fresh, sink.remaining = state

    def begin_batch(self, microbatches: int | None) -> None:
        """Discards the last batch's gradient. microbatches: how many will contribute (None: `GradientReducer.arm` marks
        the last one)."""
        assert self.gradient.handle is None, "the last batch was never finished"
        self.gradient.begin_batch()
        self.gradient.missing = len(self.sinks)
        for sink in self.sinks:
            sink.reopen()
            if microbatches is not None:
                sink.expect(sink.uses * microbatches)

    def open(self) -> None:
        """Called when a sink is about to receive its first contribution."""
        self.gradient.open()

    def zero_unused(self) -> None:
        """Zeroes the gradients of parameters that received no contribution."""
        self.open()
        for sink in self.sinks:
            if sink.fresh:
                _ = sink.grad

    def fill_into(self, full: Tensor) -> None:
        """From now on the sinks write into `full`, which is uninitialised; gaps between parameters become zero."""
        end = 0
        for sink, range_ in zip(self.sinks, self.plan.ranges, strict=True):
            begin = range_.start - self.plan.start
            full[end:begin].zero_()
            end = begin + range_.entry.numel
            sink.use_buffer(full[begin:end].view(range_.entry.shape))
        full[end:].zero_()

    def forget_memory(self) -> None:
        """Makes the sinks drop their views, so that the memory can be freed."""
        for sink in self.sinks:
            sink.buffer = self.empty


class BucketGradient:
    """The gradient of a bucket, from the first contribution of a batch to the owned slice of the sum.

    streams: every micro-batch is reduced by itself.
    keep: its memory stays between batches.
    missing: sinks that still wait for contributions; at 0 the reduction may start.
    handle: of the reduction in flight.
    launched: whether the batch's only reduction has been started.
    sums: over further axes that have been started.
    """

    streams = False

    def __init__(self, bucket: Bucket, *, keep: bool = True) -> None:
        self.bucket, self.keep = bucket, keep
        self.missing = 0
        self.handle: Handle | None = None
        self.launched, self.sums = False, 0

    @property
    def full(self) -> Tensor:
        """The sum over this rank's micro-batches, before the reduction; only while open."""
        raise NotImplementedError

    @property
    def reduced(self) -> Tensor:
        """The owned slice of the sum over ranks, valid after `finish_batch`."""
        raise NotImplementedError

    @property
    def needs_reduction(self) -> bool:
        """Whether part of this batch has not been launched."""
        return not self.launched

    def sink(self, range_: ParameterRange, *, uses: int, on_ready: Callable[[], None]) -> GradSink:
        return GradSink(uses=uses, on_ready=on_ready, on_open=self.bucket.open)

    def begin_batch(self) -> None:
        """Discards the last batch's gradient."""
        self.launched, self.sums = False, 0

    def open(self) -> None:
        """Allocates `full`, uninitialised."""

    def launch(self, *, async_op: bool) -> None:
        """Starts the reduction of what has arrived."""
        raise NotImplementedError

    def finish(self) -> None:
        """Waits for what was launched."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None

    def follow(self, *, async_op: bool) -> None:
        """Waits for the sum in flight, the batch's last over its axis, and starts that over the next axis."""
        self.finish()
        further, self.sums = self.bucket.further[self.sums :], self.sums + 1
        if further and self.reduced.numel():
            self.handle = all_reduce_(self.reduced, further[0], async_op=async_op)

    def finish_batch(self) -> None:
        """The last `finish` of a batch."""
        assert self.launched, "finish_reduce before start_reduce and start_tied_reduce"
        self.finish()


class HeldGradient(BucketGradient):
    """Whole on every rank until the step (stages 0 and 1, tied parameters in any stage): all micro-batches of an update
    add up in `full`, which is reduced once, in place.

        empty --open: first contribution--> filling --launch: all sinks are complete--> reducing --finish--> reduced
          ^                                                                                                     |
          '-------------------------------------------- begin_batch --------------------------------------------'

    In stage 0 every rank gets the whole sum (all-reduce), in the others each gets its slice (reduce-scatter). The sum
    is not divided: the factor 1 / (micro-batches * data-parallel size) is already in the loss.
    """

    _full: Tensor | None = None

    @property
    def full(self) -> Tensor:
        assert self._full is not None, "the bucket's gradient is not in memory"
        return self._full

    @property
    def reduced(self) -> Tensor:
        if self._full is None:
            self.open()
            self.full.zero_()
        return self.full[self.bucket.owned]

    def begin_batch(self) -> None:
        super().begin_batch()
        if not self.keep:
            self._full = None
            self.bucket.forget_memory()

    def open(self) -> None:
        if self._full is None:
            self._full = self.bucket.empty.new_empty(self.bucket.numel)
            self.bucket.fill_into(self._full)

    def launch(self, *, async_op: bool) -> None:
        self.bucket.zero_unused()
        self.launched = True
        axis = self.bucket.axis
        if self.bucket.sharded:
            sizes = self.bucket.plan.sizes
            self.handle = reduce_scatter_into(self.reduced, self.full, axis, sizes=sizes, async_op=async_op)
        else:
            self.handle = all_reduce_(self.full, axis, async_op=async_op)


Part = TypeVar("Part", ParameterRange, BucketSegment)


def overlaps(parts: Iterable[Part], start: int, stop: int) -> Iterator[tuple[Part, slice, slice]]:
    """(A part that shares elements with `start .. stop` of the family; which, from its start on; from `start` on) of
    all that do."""
    for part in parts:
        first, last = max(part.start, start), min(part.stop, stop)
        if first < last:
            yield part, slice(first - part.start, last - part.start), slice(first - start, last - start)
