"""Sums of a stage's gradients over the ranks that hold copies of its parameters, while the backward runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megalite.comm import Axis, FamilyAxes, Handle, all_reduce_
from megalite.gradient import GradSink, attach_sink
from megalite.parallel.zero.bucket import Bucket, bytes_of
from megalite.parallel.zero.held_gradient import HeldGradient
from megalite.parallel.zero.options import ZeroOptions
from megalite.parallel.zero.streamed_gradient import ScratchPool, StreamedGradient, StreamingSink

MOST_UNDER_WAY = 2
"""Reductions of held gradients at a time: more would only queue, and each holds what arrives beside the gradient."""


class ReductionOrder:
    """Starts the reductions of a stage's buckets over one axis, as they become complete.

    Every rank of the axis starts them in one order: that of the families and of their plans, never that of arrival.
    """

    def __init__(self, options: ZeroOptions) -> None:
        self._overlap, self._eager = options.overlap_grad_reduce, options.stage >= 2
        self._buckets: list[Bucket] = []
        self._nexts = [0]
        self._selected = 0
        self._under_way: deque[Handle] = deque()

    def add(self, buckets: Sequence[Bucket], num_gradients: int) -> None:
        """Further buckets, those of a family, with this number of gradients each."""
        self._buckets += [bucket for bucket in buckets if not bucket.plan.tied]
        self._nexts = [0] * num_gradients

    def select(self, index: int) -> None:
        """What follows is about gradient number `index`."""
        self._selected = index

    def begin_batch(self) -> None:
        """Nothing of the selected gradient has been started."""
        self._nexts[self._selected] = 0

    def bucket_is_complete(self) -> None:
        """Starts it, and others, when it is their turn."""
        if not self._overlap and not self._eager:
            return
        place = self._nexts[self._selected]
        while place < len(self._buckets) and self._buckets[place].gradient.missing == 0:
            self.start(self._buckets[place])
            place += 1
            if place == len(self._buckets) and self._eager:
                place = 0  # the next micro-batch goes round again
        self._nexts[self._selected] = place

    def start(self, bucket: Bucket) -> None:
        """Starts one bucket out of turn."""
        gradient = bucket.gradient
        if not gradient.streams and bucket.sharded:  # what arrives needs memory of its own until it is added up
            while len(self._under_way) >= MOST_UNDER_WAY:
                self._under_way.popleft().wait()
        gradient.launch(async_op=self._overlap)
        if not self._overlap:
            gradient.finish()
        elif not gradient.streams and gradient.handle is not None:
            self._under_way.append(gradient.handle)


class GradientReducer:
    """The gradients of one family: gives the parameters their sinks, and reduces bucket after bucket.

    Args:
        parameters: by forward index, then weight version; all versions of a parameter add into one gradient.
        extra_reduce: further axes that hold replicas of this stage; tied gradients have been summed over them already.
        order: in which reductions start, shared with other families of the stage over the same axes.
        pool: scratch of gradients that are streamed. keep: of those, as in `StreamedGradient`.
        num_gradients: updates whose gradients are in memory at once; more than one in stages 0 and 1 only.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Sequence[Sequence[nn.Parameter]],
        *,
        axes: FamilyAxes,
        stage: int,
        extra_reduce: Sequence[Axis],
        order: ReductionOrder,
        pool: ScratchPool,
        num_gradients: int,
        keep: bool,
    ) -> None:
        assert num_gradients == 1 or stage < 2, "gradients that are streamed cannot be kept for two updates"
        self._buckets, self._axes, self._extra_reduce = buckets, axes, extra_reduce
        self._order, self._pool = order, pool
        self._num_gradients, self._selected = num_gradients, 0
        order.add(buckets, num_gradients)
        for bucket in buckets:
            if stage < 2 or bucket.plan.tied:
                bucket.gradients = [HeldGradient(bucket, keep=keep or stage < 2) for _ in range(num_gradients)]
            else:
                bucket.gradients = [StreamedGradient(bucket, pool, keep=keep)]
            for range_ in bucket.plan.ranges:
                self._add_sink(bucket, parameters[range_.entry.index])
        for index in reversed(range(num_gradients)):
            self.select(index)
            self.begin_batch()
            for bucket in buckets:
                if bucket.gradient.keep:
                    _ = bucket.gradient.reduced  # makes the memory that stays

    def _add_sink(self, bucket: Bucket, versions: Sequence[nn.Parameter]) -> None:
        uses: int = getattr(versions[0], "sink_uses", 1)

        def ready() -> None:
            bucket.gradient.missing -= 1
            if bucket.gradient.missing == 0:
                self._order.bucket_is_complete()

        sink = (
            StreamingSink(bucket.gradient, uses=uses, on_ready=ready)
            if isinstance(bucket.gradient, StreamedGradient)
            else GradSink(uses=uses, on_ready=ready, on_open=bucket.open)
        )
        bucket.sinks.append(sink)
        for parameter in versions:
            attach_sink(parameter, sink)

    def select(self, update: int) -> None:
        """Backwards, reductions and the optimizer work on the gradient of this update from here on."""
        index = update % self._num_gradients
        if index == self._selected:
            return
        self._selected = index
        self._order.select(index)
        for bucket in self._buckets:
            bucket.select(index)

    def begin_batch(self, microbatches: int | None = None) -> None:
        """The gradient is zero again. With the number of micro-batches to come, `arm` need not be called."""
        self._order.begin_batch()
        for bucket in self._buckets:
            bucket.begin_batch(microbatches)

    def arm(self) -> None:
        """The next micro-batch to run backward is the last: buckets are reduced as they become complete."""
        for bucket in self._buckets:
            for sink in bucket.sinks:
                sink.arm()

    def start_reduce(self) -> None:
        """Starts every reduction that has not started yet (tied parameters excepted)."""
        for bucket in self._buckets:
            if not bucket.plan.tied and bucket.gradient.needs_reduction:
                self._order.start(bucket)

    def tied(self) -> list[Tensor]:
        """The gradients to be summed with the other holder of the parameters, before `start_tied_reduce`."""
        tied = [bucket for bucket in self._buckets if bucket.plan.tied]
        for bucket in tied:
            bucket.close()
        return [bucket.gradient.full for bucket in tied]

    def start_tied_reduce(self) -> None:
        """Starts the reduction of the tied parameters."""
        for bucket in self._buckets:
            if bucket.plan.tied:
                self._order.start(bucket)

    def finish_reduce(self) -> None:
        """Waits for all reductions, then sums over the axes that hold further parts of the gradient."""
        for bucket in self._buckets:
            bucket.gradient.finish_batch()
            for axis in (self._axes.replicate, *(() if bucket.plan.tied else self._extra_reduce)):
                all_reduce_(bucket.gradient.reduced, axis)
        self._pool.release()
        self._sum_partial_gradients()

    def _sum_partial_gradients(self) -> None:
        """Adds up what each rank of an axis computed a share of: one small message an axis."""
        for axis in self._axes.cut:
            pieces = []
            for bucket in self._buckets:
                for segment in bucket.plan.segments:
                    start, stop = max(segment.start, bucket.owned_start), min(segment.stop, bucket.owned_stop)
                    if axis.name in segment.kind.partial and start < stop:
                        pieces.append(bucket.gradient.reduced[start - bucket.owned_start : stop - bucket.owned_start])
            if pieces:
                packed = torch.cat(pieces)
                all_reduce_(packed, axis)
                for piece, part in zip(pieces, packed.split([p.numel() for p in pieces]), strict=True):
                    piece.copy_(part)

    def memory(self) -> int:
        """Bytes of the gradients that are in memory now, scratch excepted."""
        held = (gradient.held for bucket in self._buckets for gradient in bucket.gradients)
        return bytes_of(tensor for tensor in held if tensor is not None)
