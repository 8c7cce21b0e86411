"""When the reductions of a stage's gradients start."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megalite.comm import Handle
from megalite.parallel.zero.gradient_sync import Bucket
from megalite.parallel.zero.options import ZeroOptions

MOST_UNDER_WAY = 2
"""Reductions of held buckets at a time: more would only queue, and each holds what arrives beside the gradient."""


class Launches:
    """Starts the reductions of a stage's buckets over one axis, as they become complete.

    Every rank of the axis starts them in one order: that of the families and of their plans, never that of arrival.
    """

    def __init__(self, options: ZeroOptions) -> None:
        self._overlap, self._eager = options.overlap_grad_reduce, options.stage >= 2
        self._buckets: list[Bucket] = []
        self._nexts = [0]
        self._selected = 0
        self._under_way: deque[Handle] = deque()

    def add(self, buckets: Sequence[Bucket], gradients: int) -> None:
        """Further buckets, those of a family, with this number of gradients."""
        self._buckets += [bucket for bucket in buckets if not bucket.plan.tied]
        self._nexts = [0] * gradients

    def select(self, index: int) -> None:
        """What follows is about gradient number `index`."""
        self._selected = index

    def begin_batch(self) -> None:
        """Nothing of the selected gradient has been started."""
        self._nexts[self._selected] = 0

    def ready(self) -> None:
        """A bucket is complete: starts it, and others, when it is their turn."""
        if not self._overlap and not self._eager:
            return
        place = self._nexts[self._selected]
        while place < len(self._buckets) and self._buckets[place].missing == 0:
            self.start(self._buckets[place])
            place += 1
            if place == len(self._buckets) and self._eager:
                place = 0  # the next micro-batch goes round again
        self._nexts[self._selected] = place

    def start(self, bucket: Bucket) -> None:
        """Starts one bucket out of turn."""
        if not bucket.streams and bucket.stage:  # what arrives needs memory of its own until it is added up
            while len(self._under_way) >= MOST_UNDER_WAY:
                self._under_way.popleft().wait()
        bucket.launch(async_op=self._overlap)
        if not self._overlap:
            bucket.finish()
        elif not bucket.streams and bucket.handle is not None:
            self._under_way.append(bucket.handle)
