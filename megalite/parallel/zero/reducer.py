"""Sums a stage's gradients over the ranks that hold copies of its parameters, while the backward runs."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from megalite.comm import Axis, FamilyAxes, Handle, all_reduce_, following, message_stream
from megalite.gradient import GradSink, attach_sink
from megalite.inventory import ParameterRange
from megalite.parallel.zero.bucket import Bucket, BucketGradient, HeldGradient, overlaps
from megalite.parallel.zero.host_exchange import sum_anywhere
from megalite.parallel.zero.host_gradient import HostedGradient, HostedLayers, HostedPool, HostedStream
from megalite.parallel.zero.options import StageOptions, ZeroOptions
from megalite.parallel.zero.streamed_gradient import ScratchPool, StreamedGradient

MOST_IN_FLIGHT = 2
"""Reductions of held gradients in flight at once on a CPU. More would only queue, and each needs a receive buffer."""


class ReductionOrder:
    """Starts the reductions of a stage's buckets over one axis as they become complete, on all ranks in the order of
    the families and of their plans. A bucket that is complete early waits for its turn. What follows its reduction is
    started on a GPU at once, in a stream of its own, and on a CPU once later buckets have been started."""

    def __init__(self, options: ZeroOptions) -> None:
        self.overlap, self._eager = options.overlap_grad_reduce, options.stage >= 2
        self._buckets: list[Bucket] = []
        self._next_bucket = [0]
        self.selected = 0
        self._in_flight: deque[tuple[BucketGradient, Handle]] = deque()
        self._behind = cache(message_stream)

    def add(self, buckets: Sequence[Bucket], num_gradients: int) -> None:
        self._buckets += [bucket for bucket in buckets if not bucket.plan.tied]
        self._next_bucket = [0] * num_gradients

    def begin_batch(self) -> None:
        """No reduction of the selected gradient has been started."""
        self._next_bucket[self.selected] = 0

    def bucket_is_complete(self) -> None:
        """Starts every bucket that is complete and whose turn it is."""
        if not self.overlap and not self._eager:
            return
        place = self._next_bucket[self.selected]
        while place < len(self._buckets) and self._buckets[place].gradient.missing == 0:
            self.start(self._buckets[place])
            place += 1
            if place == len(self._buckets) and self._eager:
                place = 0  # the next micro-batch begins again with the first bucket
        self._next_bucket[self.selected] = place

    def start(self, bucket: Bucket) -> None:
        """Starts the reduction of one bucket, whether or not it is its turn."""
        gradient = bucket.gradient
        on_device = bucket.empty.device.type == "cuda"
        held = not gradient.streams and bool(bucket.sharded or bucket.further)
        while held and len(self._in_flight) >= MOST_IN_FLIGHT:
            earlier, handle = self._in_flight.popleft()
            if earlier.handle is handle:  # else somebody has waited
                earlier.follow(async_op=True)
        gradient.launch(async_op=self.overlap)
        if not self.overlap:
            gradient.finish()
        elif held and on_device and bucket.further:
            with following(self._behind()):  # an axis of one rank leaves no reduction that could be waited for
                gradient.follow(async_op=True)
        elif held and not on_device and gradient.handle is not None:
            self._in_flight.append((gradient, gradient.handle))


class GradientReducer:
    """The gradients of one family: gives the parameters their sinks and reduces the buckets.

    parameters: by forward index, then weight version; all versions of a parameter add to one gradient.
    zero_stage: 0 to 3.
    order: starts the reductions, shared with other families of the stage over the same axes.
    pool: scratch for streamed gradients. If it is a `HostedPool`, gradients are on the host, except those of tied
        parameters.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Sequence[Sequence[nn.Parameter]],
        *,
        axes: FamilyAxes,
        zero_stage: int,
        pipeline_stage: StageOptions,
        order: ReductionOrder,
        pool: ScratchPool,
    ) -> None:
        num_gradients, keep = pipeline_stage.num_gradients, pipeline_stage.keep_gradients
        assert num_gradients == 1 or zero_stage < 2, "streamed gradients cannot be kept for two updates"
        self._buckets, self._axes = buckets, axes
        self._order, self._pool = order, pool
        self._sum: Callable[[Tensor, Axis], object] = all_reduce_
        if isinstance(pool, HostedPool):  # some of what is summed is on the host
            self._sum = partial(sum_anywhere, mover=pool.mover)
        self._num_gradients, self._selected = num_gradients, 0
        order.add(buckets, num_gradients)
        layers: HostedLayers = {}
        for bucket in buckets:
            if isinstance(pool, HostedPool) and not bucket.plan.tied:
                assert num_gradients == 1, "gradients on the host are of one update"
                streams = zero_stage >= 2
                bucket.gradients = [HostedStream(bucket, pool) if streams else HostedGradient(bucket, pool, layers)]
            elif zero_stage < 2 or bucket.plan.tied:
                bucket.gradients = [HeldGradient(bucket, keep=keep or zero_stage < 2) for _ in range(num_gradients)]
            else:
                bucket.gradients = [StreamedGradient(bucket, pool, keep=keep)]
            every = (axes.replicate, *(() if bucket.plan.tied else pipeline_stage.extra_reduce))
            bucket.further = [axis for axis in every if axis.size > 1]
            for range_ in bucket.plan.ranges:
                self._add_sink(bucket, range_, parameters[range_.entry.index])
        for index in reversed(range(num_gradients)):
            self.select(index)
            self.begin_batch()
            for bucket in buckets:
                if bucket.gradient.keep:
                    _ = bucket.gradient.reduced  # allocates the memory that is kept

    def _add_sink(self, bucket: Bucket, range_: ParameterRange, versions: Sequence[nn.Parameter]) -> None:
        uses: int = getattr(versions[0], "sink_uses", 1)

        def ready() -> None:
            bucket.gradient.missing -= 1
            if bucket.gradient.missing == 0:
                self._order.bucket_is_complete()

        sink = bucket.gradient.sink(range_, uses=uses, on_ready=ready)
        bucket.sinks.append(sink)
        for parameter in versions:
            attach_sink(parameter, sink)

    def select(self, update: int) -> None:
        """From now on backwards, reductions and the optimizer work on the gradient of this update."""
        index = update % self._num_gradients
        if index == self._selected:
            return
        self._selected = index
        self._order.selected = index
        for bucket in self._buckets:
            bucket.select(index)

    def begin_batch(self, microbatches: int | None = None) -> None:
        """Makes the gradient zero. If the number of micro-batches to come is given, `arm` need not be called."""
        self._order.begin_batch()
        for bucket in self._buckets:
            bucket.begin_batch(microbatches)

    def arm(self, rest: Mapping[GradSink, int] | None = None) -> None:
        """Says that the next backward is that of the last micro-batch: a bucket is reduced once it is complete.
        rest: what each sink still gets of it, where its first half is over."""
        for bucket in self._buckets:
            for sink in bucket.sinks:
                sink.expect(sink.uses if rest is None else rest.get(sink, 0))

    def start_reduce(self) -> None:
        """Starts every reduction that has not started yet, except those of tied parameters."""
        for bucket in self._buckets:
            if not bucket.plan.tied and bucket.gradient.needs_reduction:
                self._order.start(bucket)

    def tied(self) -> list[Tensor]:
        """The gradients that must be summed with those of the other stage before `start_tied_reduce`."""
        tied = [bucket for bucket in self._buckets if bucket.plan.tied]
        for bucket in tied:
            bucket.zero_unused()
        return [bucket.gradient.full for bucket in tied]

    def start_tied_reduce(self) -> None:
        """Starts the reduction of the tied parameters."""
        for bucket in self._buckets:
            if bucket.plan.tied:
                self._order.start(bucket)

    def finish_reduce(self) -> None:
        """Waits for all reductions, then sums over the axes along which there are further shares of the gradient."""
        for bucket in self._buckets:
            if bucket.gradient.sums == 0:
                bucket.gradient.finish_batch()
            while bucket.gradient.sums < len(bucket.further):
                bucket.gradient.follow(async_op=self._order.overlap)
        for bucket in self._buckets:
            bucket.gradient.finish()
        self._pool.release()
        self._sum_partial_gradients()

    def _sum_partial_gradients(self) -> None:
        """Sums gradients of which each rank of an axis has computed a share: one small message per axis."""
        for axis in self._axes.cut:
            pieces = []
            for bucket in self._buckets:
                for segment, _, own in overlaps(bucket.plan.segments, bucket.owned_start, bucket.owned_stop):
                    if axis.name in segment.kind.partial:
                        pieces.append(bucket.gradient.reduced[own])
            if pieces:
                packed = torch.cat(pieces)
                self._sum(packed, axis)
                for piece, part in zip(pieces, packed.split([p.numel() for p in pieces]), strict=True):
                    piece.copy_(part)
