"""Weights that travel in float8 (`--fp8-param-gather`): a byte an element in place of two, in stage 3.

    update     each rank finds the largest magnitudes of its slice; the largest of all ranks give every matrix its scale
               its slice of the matrices is rounded (1 byte an element); what is not rounded goes to all ranks
    gather     the rounded slices; what arrives becomes the numbers of float8 in the dtype of the weights, unscaled
    layer      takes them back to float8, which is exact, beside the scale that it knows from the update

So a weight is rounded once, as it is where each rank rounds what it has gathered, and the products are the same, bit
for bit. The slices that the optimizer writes are never rounded.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megalite.comm import Exchange, Handle, all_gather_into, all_reduce_
from megalite.inventory import BucketPlan
from megalite.parallel.zero.unshard import BucketWeights


class RoundsWeight(Protocol):
    """A parameter's attribute `float8`: `Float8Products` of parallel/tensor, which says what these do."""

    def before_gather(self, weight: Tensor, most: Tensor) -> Tensor: ...

    def rounded(self, part: Tensor, scale: Tensor) -> Tensor: ...


class RoundedWeights(BucketWeights):
    """The weights of a bucket, gathered in float8 where the layer multiplies in float8 anyway.

    weights: as they would be without it. plan: of the bucket. parameters: of the family, in forward order.
    """

    def __init__(self, weights: BucketWeights, plan: BucketPlan, parameters: Sequence[nn.Parameter]) -> None:
        self.__dict__.update(weights.__dict__)
        self._start = plan.slice_of(self.axis.rank)[0] - plan.start
        self._matrices: list[tuple[slice, nn.Parameter, RoundsWeight]] = []
        self._others: list[slice] = []
        for range_ in plan.ranges:
            begin, parameter = range_.start - plan.start, parameters[range_.entry.index]
            place = slice(begin, begin + range_.entry.numel)
            if (rule := getattr(parameter, "float8", None)) is not None:
                self._matrices.append((place, parameter, rule))
            else:
                self._others.append(place)
        self._stale = True
        self._rounded = self.shard.new_zeros(self.shard.numel(), dtype=torch.uint8)
        self._kept = self.shard.new_zeros(sum(place.stop - place.start for place in self._others))

    def updated(self, *, async_op: bool) -> None:
        self._stale = True
        super().updated(async_op=async_op)

    def _fetch(self, *, async_op: bool) -> Handle:
        if self._stale:
            self._round()
        arriving = torch.empty_like(self.full, dtype=torch.uint8)
        handle = all_gather_into(arriving, self._rounded, self.axis, sizes=self._sizes, async_op=async_op)
        return Exchange([handle], [], lambda: self._widen(arriving))

    @torch.no_grad()
    def _round(self) -> None:
        """Rounds this rank's slice of new weights; collective."""
        wide = torch.promote_types(self.shard.dtype, torch.float32)
        parts = [self._own(place) for place, _, _ in self._matrices]
        none = self.shard.new_zeros(1)
        own = [self.shard[part] if part.stop > part.start else none for part in parts]
        most = torch.stack([values.abs().amax() for values in own]).to(wide)
        all_reduce_(most, self.axis, op="max")
        for (_, parameter, rule), part, magnitude in zip(self._matrices, parts, most, strict=True):
            scale = rule.before_gather(parameter, magnitude.view(1, 1))
            if part.stop > part.start:
                self._rounded[part] = rule.rounded(self.shard[part].view(1, -1), scale).view(torch.uint8).view(-1)
        begin = 0
        self._kept.zero_()
        for place in self._others:
            mine = self._own(place)
            shift = begin + self._start - place.start
            self._kept[mine.start + shift : mine.stop + shift] = self.shard[mine]
            begin += place.stop - place.start
        all_reduce_(self._kept, self.axis)
        self._stale = False

    def _own(self, place: slice) -> slice:
        """The part of a place in the bucket that this rank owns, in elements of its slice; perhaps empty."""
        begin = min(max(place.start - self._start, 0), self.shard.numel())
        return slice(begin, max(begin, min(place.stop - self._start, self.shard.numel())))

    def _widen(self, arrived: Tensor) -> None:
        """Makes weights of what has arrived."""
        full, begin = self.full.data, 0
        full.copy_(arrived.view(torch.float8_e4m3fn))
        for place in self._others:
            numel = place.stop - place.start
            full[place] = self._kept[begin : begin + numel]
            begin += numel
