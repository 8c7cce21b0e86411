"""Compute weights whose home is the host (`--param-offload`): on the device while their layer uses them.

    host      [ layer 3 | layer 2 | layer 1 | embedding ]     one tensor, in the order of the buckets, or in stage 3
                                                              this rank's slices: what the optimizer writes
    device    [ layer 2 ] [ layer 3 ]                         the layer in use and the next one, or what a plan keeps

A weight that leaves the device is dropped: its home has the same values.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from megalite.comm import Axis, Handle, all_gather_into
from megalite.inventory import ParameterRange, align, layer_of
from megalite.parallel.tiers import Mover, TieredMemory
from megalite.parallel.zero.bucket import Bucket
from megalite.parallel.zero.flat_weights import FlatWeights
from megalite.parallel.zero.host_exchange import gather_on_host
from megalite.parallel.zero.unshard import ComingWeights

Gathers = tuple[Axis, Sequence[int]]
Layout = tuple[int, list[tuple[ParameterRange, int]], list[tuple[slice, Tensor]], Gathers | None]
"""Weights that come and go together: elements on the device; parameters, and where each begins there; `homes` and
`gathers` of `HostedWeights`."""


class HostedFlatWeights(FlatWeights):
    """A family's parameters on the host; arguments as for `FlatWeights`."""

    def _flatten(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gives every bucket its home on the host, and every layer memory on the device that comes and goes: the
        parameters are views of it. In stage 3 the homes are slices, and the layers are the buckets."""
        mover, tier = self._memory.mover, self._memory.tier
        assert tier is not None, "weights on the host are counted while they are on the device"
        homes = mover.empty([self._together], self._dtype)
        layouts: list[Layout] = []
        for bucket in self._buckets:
            plan, home, owned = bucket.plan, homes[bucket.plan.start : bucket.plan.stop], bucket.owned
            if self._cut:
                home, owned = mover.empty([owned.stop - owned.start], self._dtype), slice(None)
                places = [(range_, range_.start - plan.start) for range_ in plan.ranges]
                layouts.append((bucket.numel, places, [(bucket.owned, home)], (self._axis, plan.sizes)))
            sizes = plan.sizes if self._options.stage in (1, 2) else ()
            bucket.weights.append(HostHome(home, owned, axis=self._axis, sizes=sizes, mover=mover))
        for numel, places, pieces, gathers in layouts if self._cut else layer_layouts(self._buckets):
            weights = HostedWeights(self._zeros(numel), pieces, tier, gathers)
            for range_, begin in places:
                self._move(parameters, range_, weights.full[begin : begin + range_.entry.numel])
                self._of_parameter[id(parameters[range_.entry.index])] = weights
            weights.store()
            self._gathered.append(weights)

    def gather(self, version: int = 0) -> None:
        for bucket in self._buckets:
            bucket.weights_of(version).updated(async_op=False)
        for weights in self._gathered:
            weights.updated(async_op=False)

    def wait(self) -> None:
        """Returns when the host may write, too."""
        super().wait()
        self._memory.mover.settle()


class HostedWeights(ComingWeights):
    """Weights of one layer and family.

    homes: (part of `full`, the same elements on the host).
    gathers: the axis over which the rest comes from other ranks, of whose slices `homes` has this rank's, and how
        many elements each has.
    """

    def __init__(
        self, full: Tensor, homes: Sequence[tuple[slice, Tensor]], tier: TieredMemory, gathers: Gathers | None
    ) -> None:
        super().__init__(full, sharded=True, released_after_use=True)
        self._tier, self._gathers, self._homes = tier, gathers, list(homes)
        tier.count(self.nbytes)

    def allocate(self) -> None:
        self._tier.count(0 if self.resident else self.nbytes)
        super().allocate()

    def free(self) -> None:
        before = self.resident
        super().free()
        self._tier.count(-self.nbytes if before and not self.resident else 0)

    def _fetch(self, *, async_op: bool) -> Handle:
        # `.data` has its own version counter: what autograd saved of these weights is unchanged by their coming back.
        full, start = self.full.data, None
        pairs = [(full[place], home) for place, home in self._homes]
        if self._gathers is not None:
            axis, sizes = self._gathers
            start = partial(all_gather_into, full, pairs[0][0], axis, sizes=sizes, async_op=async_op)
        return self._tier.mover.to_device(pairs, start=start)

    def store(self) -> None:
        """Writes what is on the device into its home, and lets go of it there."""
        self._tier.mover.to_host([(home, self.full.data[place]) for place, home in self._homes]).synchronize()
        self.free()


class HostHome:
    """A bucket's weights on the host, whole or this rank's slice, in place of `BucketWeights`.

    full: what is there; shard: what this rank owns of it.
    sizes: elements that each rank owns of `full`; none where it is all this rank's.
    """

    def __init__(self, full: Tensor, owned: slice, *, axis: Axis, sizes: Sequence[int], mover: Mover) -> None:
        self.full, self.shard, self.axis, self._sizes, self._mover = full, full[owned], axis, sizes, mover

    def updated(self, *, async_op: bool) -> None:
        """Called when `shard` holds new values: gathers those of the others, if `full` has more."""
        if len(self._sizes) > 1:
            gather_on_host(self.full, self.axis, self._sizes, self._mover)


def layer_layouts(buckets: Sequence[Bucket]) -> Iterator[Layout]:
    """Layers, in the order in which backward comes to them; the host has whole buckets. What lies together there is
    copied in one piece."""
    layers: dict[str, list[tuple[Bucket, ParameterRange]]] = {}
    for bucket in buckets:
        for range_ in bucket.plan.ranges:
            layers.setdefault(layer_of(range_.entry.name), []).append((bucket, range_))
    for parts in layers.values():
        end, places = 0, list[tuple[ParameterRange, int]]()
        pieces: list[tuple[Bucket, int, int, int]] = []  # start and stop in the bucket, begin on the device
        for bucket, range_ in parts:
            start, begin = range_.start - bucket.plan.start, end
            stop, end = start + range_.entry.numel, align(begin + range_.entry.numel)
            places.append((range_, begin))
            if pieces and pieces[-1][0] is bucket and start - pieces[-1][1] == begin - pieces[-1][3]:
                _, start, _, begin = pieces.pop()
            pieces.append((bucket, start, stop, begin))
        homes = [(slice(at, at + stop - start), its.weights[-1].full[start:stop]) for its, start, stop, at in pieces]
        yield end, places, homes, None
