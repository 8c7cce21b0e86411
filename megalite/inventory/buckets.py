"""Where every parameter lies in the flat buffer of a stage: pure arithmetic, the same on every data-parallel rank.

A bucket is a contiguous range of the buffer that is reduced in one message and cut into contiguous slices, one per
owner. There are two ways to place parameters in it; reduction, gathering, norm and checkpoint need not know which one
was used:

    flat            parameters one after the other; slices are equal, and one may begin in the middle of a parameter
                    [ w2 w1 | norm bias ... pad ]         cut anywhere: |--- rank 0 ---|--- rank 1 ---|
    whole tensors   each parameter lies in one slice, as Muon needs it; slices are as long as what they hold
                    [ w3 w1 | w2 ]                                         |- rank 0 -|rank 1|

Whole tensors go to the owner that has least of all buckets so far, so slices of one bucket may be unequal or empty,
while the owners' shares of the buffer are nearly equal, and nothing is padded.

Inside a flat bucket the parameters are sorted by `ElementKind`, so that an optimizer sees few long segments instead of
hundreds of small tensors.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.config import Rates
from megalite.inventory.parameter_placement import ParameterPlacement, Shape

ALIGNMENT = 64
"""Every parameter, segment and slice begins at a multiple of this many elements, which fill whole vector registers. So
an elementwise update rounds the same way wherever a slice begins: stage 1 is bitwise stage 0."""


class ElementKind(NamedTuple):
    """What optimizer and norm must know about an element; elements of one kind lie together.

    no_decay: no weight decay.
    sharded, partial: as in `ParameterPlacement`.
    rates: its own factors of the optimizer's numbers.
    """

    no_decay: bool
    sharded: frozenset[str]
    partial: frozenset[str]
    rates: Rates = Rates()

    @property
    def order(self) -> tuple[bool, bool, list[str], list[str], Rates]:
        """Sort key: kinds that decay come first, then those that are cut."""
        return self.no_decay, not self.sharded, sorted(self.sharded), sorted(self.partial), self.rates


@dataclass(frozen=True)
class BufferParameter:
    """A parameter to be placed in a buffer.

    index: its position in forward order.
    whole: it must lie in one slice.
    rates: as in `ElementKind`.
    """

    index: int
    name: str
    shape: Shape
    placement: ParameterPlacement
    whole: bool = False
    rates: Rates = Rates()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def kind(self) -> ElementKind:
        place = self.placement
        return ElementKind(not place.decay, place.sharded, place.partial, self.rates)


@dataclass(frozen=True)
class ParameterRange:
    """A parameter's place: elements `start .. start + numel` of the flat buffer."""

    entry: BufferParameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.entry.numel


@dataclass(frozen=True)
class BucketSegment:
    """A range of the buffer whose elements are of one kind, including gaps for alignment, which are always zero.

    ranges: the parameters inside, in order.
    whole: there is exactly one parameter inside, to be updated as a matrix.
    """

    start: int
    stop: int
    kind: ElementKind
    ranges: tuple[ParameterRange, ...]
    whole: bool = False


@dataclass(frozen=True)
class BucketPlan:
    """Elements `start .. stop` of the buffer.

    bounds: owner r has the elements `bounds[r] .. bounds[r + 1]`, all multiples of `ALIGNMENT`.
    tied: its parameters are shared with another stage.
    layer: the layer that it belongs to, if there is a bucket per layer.
    """

    start: int
    stop: int
    segments: tuple[BucketSegment, ...]
    bounds: tuple[int, ...]
    tied: bool = False
    layer: str = ""

    @property
    def ranges(self) -> list[ParameterRange]:
        return [range_ for segment in self.segments for range_ in segment.ranges]

    @property
    def sizes(self) -> list[int]:
        """How many elements each owner has."""
        return [stop - start for start, stop in itertools.pairwise(self.bounds)]

    def slice_of(self, owner: int) -> tuple[int, int]:
        """(start, stop) of the elements that `owner` has."""
        return self.bounds[owner], self.bounds[owner + 1]

    def segments_of(self, owner: int) -> list[BucketSegment]:
        """Those that `owner` has, or has a part of."""
        start, stop = self.slice_of(owner)
        return [segment for segment in self.segments if segment.start < stop and start < segment.stop]


def layer_of(name: str) -> str:
    """The layer that a logical name belongs to: `layers.3`, `embedding`, `head`, `transformer.h.3`."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])


def bucket_limit(bucket_size: int | None, shards: int, *, on_cpu: bool, overlap: bool) -> int | None:
    """Elements after which a bucket is closed: `bucket_size` if it is given. None: a single bucket.

    By default, with overlap, `max(40M, 1M * shards)` on a GPU (Megatron's: the latency of a ring grows with its
    ranks), 8M on a CPU, where large messages gain nothing; without overlap one bucket.
    """
    if bucket_size or not overlap:
        return bucket_size or None
    return 8_000_000 if on_cpu else max(40_000_000, 1_000_000 * shards)


def plan_buckets(
    entries: Sequence[BufferParameter],
    *,
    zero_stage: int,
    shards: int,
    bucket_size: int | None,
    overlap: bool,
    on_cpu: bool,
    tied: frozenset[str] = frozenset(),
) -> list[BucketPlan]:
    """Buckets in the order in which backward completes them: the last layers first, tied parameters at the very end.

    Stage 0 shards nothing. Stage 3, and stage 2 without `bucket_size`, have one bucket per layer; the others close a
    bucket after `bucket_limit` elements.
    """
    by_layer = zero_stage == 3 or (zero_stage == 2 and bucket_size is None)
    limit = bucket_limit(bucket_size, shards, on_cpu=on_cpu, overlap=overlap)
    loads = [0] * (shards if zero_stage else 1)
    plans: list[BucketPlan] = []
    start = 0
    for group in _group(entries, limit, tied, by_layer):
        place = _place_whole if group[0].whole else _place_flat
        segments, bounds = place(group, start, loads)
        layer = layer_of(group[0].name) if by_layer else ""
        plans.append(BucketPlan(start, bounds[-1], tuple(segments), bounds, tied=group[0].name in tied, layer=layer))
        start = bounds[-1]
    return plans


def _group(
    entries: Sequence[BufferParameter], bucket_size: int | None, tied: frozenset[str], by_layer: bool
) -> list[list[BufferParameter]]:
    """The entries of each bucket. Whole tensors never share a bucket with flat ones."""
    groups: list[list[BufferParameter]] = []
    open_groups: dict[tuple[bool, bool, str], list[BufferParameter]] = {}
    filled: dict[tuple[bool, bool, str], int] = {}
    backward = sorted(entries, key=lambda entry: (entry.name in tied, -entry.index))
    for entry in backward:
        key = (entry.name in tied, entry.whole, layer_of(entry.name) if by_layer else "")
        full = not by_layer and bucket_size is not None and filled.get(key, 0) >= bucket_size
        if key not in open_groups or full:
            open_groups[key] = []
            filled[key] = 0
            groups.append(open_groups[key])
        open_groups[key].append(entry)
        filled[key] += entry.numel
    return groups


_Placed = tuple[list[BucketSegment], tuple[int, ...]]
"""The segments of a bucket and the bounds of its slices."""


def _place_flat(group: Sequence[BufferParameter], start: int, loads: Sequence[int]) -> _Placed:
    """loads: one number an owner."""
    shards = len(loads)
    ordered = sorted(group, key=lambda entry: entry.kind.order)
    at = start
    pieces: list[tuple[ElementKind, list[ParameterRange]]] = []
    for entry in ordered:
        if not pieces or pieces[-1][0] != entry.kind:
            pieces.append((entry.kind, []))
        pieces[-1][1].append(ParameterRange(entry, at))
        at = align(at + entry.numel)
    stop = start + align(at - start, shards * ALIGNMENT)
    bounds = [ranges[0].start for _, ranges in pieces] + [stop]
    segments = [BucketSegment(bounds[i], bounds[i + 1], kind, tuple(ranges)) for i, (kind, ranges) in enumerate(pieces)]
    size = (stop - start) // shards
    return segments, tuple(range(start, stop + 1, size))


def _place_whole(group: Sequence[BufferParameter], start: int, loads: list[int]) -> _Placed:
    """Largest first onto the owner with least (Graham 1969). loads: elements that each owner has in buckets of whole
    tensors, this one's included afterwards."""
    owned: list[list[BufferParameter]] = [[] for _ in loads]
    for entry in sorted(group, key=lambda entry: (-entry.numel, entry.index)):
        owner = loads.index(min(loads))
        owned[owner].append(entry)
        loads[owner] += align(entry.numel)
    at, segments, bounds = start, [], [start]
    for entries in owned:
        for entry in entries:
            only = (ParameterRange(entry, at),)
            segments.append(BucketSegment(at, at := at + align(entry.numel), entry.kind, only, whole=True))
        bounds.append(at)
    return segments, tuple(bounds)


def align(count: int, unit: int = ALIGNMENT) -> int:
    """The next multiple of `unit`."""
    return -(-count // unit) * unit
