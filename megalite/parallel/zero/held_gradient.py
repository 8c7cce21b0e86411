"""The gradient of a bucket that is whole on every rank until the step: stages 0 and 1, tied parameters in any stage."""

from __future__ import annotations

from torch import Tensor

from megalite.comm import all_reduce_, reduce_scatter_into
from megalite.parallel.zero.bucket import BucketGradient


class HeldGradient(BucketGradient):
    """All micro-batches of an update add up in `full`, which is reduced once, in place.

        empty --open: first contribution--> filling --launch: all sinks are complete--> reducing --finish--> reduced
          ^                                                                                                     |
          '-------------------------------------------- begin_batch --------------------------------------------'

    In stage 0 every rank gets the whole sum (all-reduce), in the others each gets its slice (reduce-scatter). The sum
    is not divided: the factor 1 / (micro-batches * data-parallel size) is already in the loss.

    An asynchronous pipeline accumulates the gradient of one update while that of the previous update is being reduced;
    the bucket then has one `HeldGradient` for each.
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
        return self.bucket.owned(self.full)

    @property
    def held(self) -> Tensor | None:
        return self._full

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
            self.handle = reduce_scatter_into(self.reduced, self.full, axis, async_op=async_op)
        else:
            self.handle = all_reduce_(self.full, axis, async_op=async_op)
