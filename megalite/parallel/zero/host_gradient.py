"""The gradient of a bucket on the host in stages 0 and 1: on the device while a backward adds to it.

    host      [ layer 3 | layer 2 | layer 1 | embedding ]        the bucket's, all micro-batches so far
    device          [ layer 2 ] [ layer 1 ]                      of the layer in its backward, and on the way

    open      the first contribution of a micro-batch: what the host has of the layer comes to the device (nothing in
              the first micro-batch) and that of the next layer starts to
    close     the last one: it goes back

So every contribution is added where and as it would be without the host, and the bits are the same. Ranks exchange
whole gradients once, before the update. Stages 2 and 3 send the slices of each micro-batch to the host
(`HostedStream`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalite.gradient import GradSink
from megalite.inventory import ParameterRange, layer_of
from megalite.parallel.tiers import Arrival, TieredMemory
from megalite.parallel.zero.bucket import Bucket, BucketGradient
from megalite.parallel.zero.host_exchange import sum_anywhere, sum_on_host
from megalite.parallel.zero.streamed_gradient import ScratchPool, StreamedGradient


class HostedPool(ScratchPool):
    """Scratch from which gradients go to the host, one piece more than in `ScratchPool`, all as large as the largest
    that was announced. Its bytes are counted."""

    def __init__(self, dtype: torch.dtype, tier: TieredMemory) -> None:
        super().__init__(dtype, tier.mover.device)
        self.mover, self._tier = tier.mover, tier
        self._counted = self._largest = 0
        self._leaving: deque[tuple[Arrival, Tensor]] = deque()

    def expect(self, numel: int) -> None:
        """Says how many elements will be taken at a time."""
        self._largest = max(self._largest, numel)

    def take(self, numel: int) -> Tensor:
        piece = super().take(max(numel, self._largest))
        self._count()
        return piece

    def release(self) -> None:
        self.settle()
        super().release()
        self._count()

    def leaves(self, arrival: Arrival, piece: Tensor) -> None:
        """A piece is on its way to the host; the one before it must have arrived."""
        self._leaving.append((arrival, piece))
        if len(self._leaving) > 1:
            self._settle_one()

    def settle(self) -> None:
        """Returns when nothing is on its way to the host."""
        while self._leaving:
            self._settle_one()

    def _settle_one(self) -> None:
        arrival, piece = self._leaving.popleft()
        arrival.wait()
        self.give_back(piece)

    def _count(self) -> None:
        self._tier.count(self._bytes - self._counted)
        self._counted = self._bytes


class _OnHost(BucketGradient):
    """One whose slice is on the host."""

    pool: HostedPool

    def finish_batch(self) -> None:
        self.finish()
        self.pool.mover.settle()
        super().finish_batch()

    def follow(self, *, async_op: bool) -> None:
        axis, self.sums = self.bucket.further[self.sums], self.sums + 1
        if self.reduced.numel():
            sum_anywhere(self.reduced, axis, mover=self.pool.mover)


class HostedStream(_OnHost, StreamedGradient):
    """A `StreamedGradient` whose slice is on the host, which adds to it."""

    def __init__(self, bucket: Bucket, pool: HostedPool) -> None:
        super().__init__(bucket, pool, keep=True)
        self.pool = pool
        pool.expect(bucket.numel)
        self._slice = pool.mover.empty([bucket.owned_stop - bucket.owned_start], bucket.gradient_dtype)

    def _add(self, arrived: Tensor, piece: Tensor) -> None:
        landed, arrival = self.pool.mover.land(arrived)
        add = self.reduced.add_ if self._slice_is_valid else self.reduced.copy_
        self.pool.mover.then(lambda: add(landed), arrival)
        self.pool.leaves(arrival, piece)
        self._ends = False  # what follows is the host's, after the batch


class HostedGradient(_OnHost):
    """The gradient of a bucket that is not tied. layers: of all buckets of the family.

    Gradients of norms and biases (which do not decay) are small, and in a split backward they come long before those
    of their layer's matrices: they stay on the device until the update.
    """

    def __init__(self, bucket: Bucket, pool: HostedPool, layers: HostedLayers) -> None:
        super().__init__(bucket)
        self.pool, self._layers = pool, layers
        self._home = pool.mover.empty([bucket.numel], bucket.gradient_dtype)
        vectors = sum(range_.entry.numel for range_ in bucket.plan.ranges if not range_.entry.placement.decay)
        self._vectors = bucket.empty.new_zeros(vectors)
        self._used = 0

    @property
    def full(self) -> Tensor:
        return self._home

    @property
    def reduced(self) -> Tensor:
        return self._home[self.bucket.owned]

    def home(self, range_: ParameterRange) -> Tensor:
        """The part of a parameter, on the host."""
        begin = range_.start - self.bucket.plan.start
        return self._home[begin : begin + range_.entry.numel].view(range_.entry.shape)

    def sink(self, range_: ParameterRange, *, uses: int, on_ready: Callable[[], None]) -> GradSink:
        if range_.entry.placement.decay:
            layer = self._layers.get(name := layer_of(range_.entry.name))
            if layer is None:
                last = next(reversed(self._layers.values()), None)
                layer = self._layers[name] = LayerGradient(self.pool)
                if last is not None:
                    last.before = layer
            return LayerSink(layer, self, self.home(range_), uses=uses, on_ready=on_ready)
        sink = GradSink(uses=uses, on_ready=on_ready)
        begin, self._used = self._used, self._used + range_.entry.numel
        sink.use_buffer(self._vectors[begin : self._used].view(range_.entry.shape))
        return sink

    def launch(self, *, async_op: bool) -> None:
        """Sums over the ranks."""
        for sink in self.bucket.sinks:
            if isinstance(sink, LayerSink):
                sink.layer.settle()
        self.pool.mover.settle()
        self.launched = True
        for sink, home in zip(self.bucket.sinks, map(self.home, self.bucket.plan.ranges), strict=True):
            if sink.fresh:
                home.zero_()
            elif not isinstance(sink, LayerSink):
                home.copy_(sink.buffer)
        sizes = self.bucket.plan.sizes if self.bucket.sharded else None
        sum_on_host(self._home, self.bucket.axis, self.pool.mover, sizes)


HostedLayers = dict[str, "LayerGradient"]


class LayerGradient:
    """The gradients of a layer's matrices: on the host, and in scratch of the device during its backward.

    before: the layer whose backward comes next.
    """

    def __init__(self, pool: HostedPool) -> None:
        self.pool = pool
        self.before: LayerGradient | None = None
        self.sinks: list[LayerSink] = []
        self._scratch: Tensor | None = None
        self._coming: Arrival | None = None
        self._gone: Arrival | None = None
        self._is_open = False

    def open(self) -> None:
        """A micro-batch's first contribution is about to be added."""
        if self._is_open:
            return
        self.fetch()
        if self._coming is not None:
            self._coming.wait()
        self._coming, self._is_open = None, True
        if self.before is not None and self.before is not self:
            self.before.fetch()

    def fetch(self) -> None:
        """Starts to bring what the host has."""
        if self._scratch is not None or not self.sinks:
            return
        self._scratch = self.pool.take(sum(sink.home.numel() for sink in self.sinks))
        begin, coming = 0, []
        for sink in self.sinks:
            sink.buffer = self._scratch[begin : begin + sink.home.numel()].view(sink.home.shape)
            begin += sink.home.numel()
            if sink.is_summed:
                coming.append((sink.buffer, sink.home))
        self._coming = self.pool.mover.to_device(coming, after=self._gone) if coming else None

    def contributed(self) -> None:
        """A sink has received something: the micro-batch may be complete."""
        if self._scratch is None or any(sink.seen < sink.uses for sink in self.sinks):
            return
        for sink in self.sinks:
            sink.seen -= sink.uses
        self._close()

    def _close(self) -> None:
        assert self._scratch is not None
        going = [(sink.home, sink.buffer) for sink in self.sinks if sink.is_summed]
        self._gone = self.pool.mover.to_host(going)
        self.pool.leaves(self._gone, self._scratch)
        self._scratch, self._is_open = None, False
        self._forget()

    def settle(self) -> None:
        """Sends what is on the device to the host; returns when it has arrived."""
        if self._is_open:
            self._close()
        elif self._scratch is not None:  # it was fetched in vain
            if self._coming is not None:
                self._coming.wait()
            self.pool.give_back(self._scratch)
            self._coming = self._scratch = None
            self._forget()
        self.pool.settle()

    def _forget(self) -> None:
        for sink in self.sinks:  # a view would keep the memory alive
            sink.buffer = sink.nothing


class LayerSink(GradSink):
    """The sink of a matrix. seen: contributions of micro-batches that are not complete."""

    __slots__ = ("layer", "gradient", "home", "nothing", "seen")

    def __init__(self, layer: LayerGradient, gradient: HostedGradient, home: Tensor, **how: Any) -> None:
        self.nothing = gradient.bucket.empty
        super().__init__(self.nothing, **how)
        self.layer, self.gradient, self.home, self.seen = layer, gradient, home, 0
        layer.sinks.append(self)
        layer.pool.expect(sum(sink.home.numel() for sink in layer.sinks))

    @property
    def is_summed(self) -> bool:
        """Whether there is something of this rank's, which the other ranks have not seen."""
        return not self.fresh and not self.gradient.launched

    def _opens(self) -> bool:
        self.layer.open()
        return super()._opens()

    def reopen(self) -> None:
        super().reopen()
        self.seen = 0

    def done(self) -> None:
        self.seen += 1
        self.layer.contributed()
        super().done()
