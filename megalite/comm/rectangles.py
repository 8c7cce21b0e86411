"""Every tensor knows its place: rectangles of logical tensors.

A *logical tensor* is a parameter (or a moment of it) of the whole model, as one process without padding would hold
it. What a rank holds of it is a rectangle: tensor parallelism cuts rows or columns, ZeRO cuts contiguous ranges of a
flat buffer, and a contiguous range of a row-major tensor is at most `2 * ndim - 1` rectangles. Checkpoints,
resharding, gradient-norm counting and conversion all speak this one language, so none of them needs to know another.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megalite.inventory import Box, BufferParameter, ParameterPlacement, Shape


@dataclass(frozen=True)
class TensorShard:
    """A named rectangle of a logical tensor together with the local values.

    name: logical name, e.g. `layers.3.mlp.fc1.weight`; optimizer state carries a prefix (`optimizer/exp_avg/...`).
    global_shape, offset: the rectangle is `offset .. offset + local.shape`.
    local: the values (a view: loading writes through it).
    replica: 0 on the one rank that writes this rectangle, 1, 2, ... on ranks that hold a copy.
    """

    name: str
    global_shape: Shape
    offset: Shape
    local: Tensor
    replica: int = 0

    def __post_init__(self) -> None:
        ends = tuple(start + extent for start, extent in zip(self.offset, self.local.shape, strict=True))
        if any(end > total for end, total in zip(ends, self.global_shape, strict=True)):
            raise ValueError(f"{self.name}: rectangle {self.offset}..{ends} leaves the tensor {self.global_shape}")

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.local.shape))


class FlatPiece(NamedTuple):
    """Elements `start .. stop` of parameter number `parameter` of a list, which lie from `at` on in a flat tensor."""

    parameter: int
    start: int
    stop: int
    at: int


class Statistic(NamedTuple):
    """Optimizer state of a parameter as a whole: fewer dimensions (`kept`), the same on all ranks that share it.

    parameter: its number in a list. sharded: names of the axes along which ranks hold other values.
    whole: only the rank that owns the parameter has the values, those of the whole logical tensor; of stacked matrices
    which ranks are dealt, of its own. width: of its last dimension, where that is shorter than `kept` says.
    """

    label: str
    parameter: int
    kept: tuple[int, ...]
    values: Tensor
    sharded: frozenset[str]
    whole: bool = False
    width: int | None = None

    def shard(self, of: BufferParameter, replica: int) -> TensorShard:
        """The values as a rectangle of the logical tensor `optimizer/<label>/<name>` (padding left out)."""
        place = of.placement
        total = tuple(place.global_shape[d] for d in self.kept)
        total = total if self.width is None else (*total[:-1], self.width)
        if self.whole:
            sizes = zip(self.kept, self.values.shape, total, strict=True)
            begin = tuple(0 if have == all_ else place.offset[d] for d, have, all_ in sizes)
            return TensorShard(f"optimizer/{self.label}/{of.name}", total, begin, self.values, replica)
        # a rank may hold padding only: it begins beyond the end
        offset = tuple(min(place.offset[d], place.global_shape[d]) for d in self.kept)
        valid = place.valid_shape(of.shape)
        local = self.values[tuple(slice(0, valid[d]) for d in self.kept)]
        return TensorShard(f"optimizer/{self.label}/{of.name}", total, offset, local, replica)


def range_to_rectangles(shape: Shape, start: int, stop: int) -> list[Box]:
    """Cuts the flat range `start .. stop` of a row-major tensor of `shape` into rectangles, one behind the other in it.

    Raises ValueError for a range outside the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range {start}..{stop} leaves a tensor of shape {shape}")
    if start == stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop - start,)) if shape else Box((), ())]
    inner = math.prod(shape[1:])
    pieces: list[Box] = []
    at = start
    while at < stop:
        row, column = divmod(at, inner)
        if column or stop - at < inner:  # a partial row: one dimension less
            end = min(stop, (row + 1) * inner)
            for part in range_to_rectangles(shape[1:], column, end - row * inner):
                pieces.append(Box((row, *part.offset), (1, *part.shape)))
        else:  # as many whole rows as there are
            rows = (stop - at) // inner
            end = at + rows * inner
            pieces.append(Box((row, *(0,) * len(shape[1:])), (rows, *shape[1:])))
        at = end
    return pieces


def shards_of_range(
    name: str, placement: ParameterPlacement, local_shape: Shape, flat: Tensor, start: int, *, replica: int = 0
) -> list[TensorShard]:
    """TensorShards for `flat`, a parameter's values from `start` on (views, padding left out)."""
    valid = placement.valid_shape(local_shape)
    shards = []
    boxes = range_to_rectangles(local_shape, start, start + flat.numel())
    for box, part in zip(boxes, flat.split([box.numel for box in boxes]), strict=True):
        inside = tuple(slice(0, max(0, end - at)) for end, at in zip(valid, box.offset, strict=True))
        values = part.view(box.shape)[inside]
        if values.numel():
            offset = tuple(a + b for a, b in zip(placement.offset, box.offset, strict=True))
            shards.append(TensorShard(name, placement.global_shape, offset, values, replica))
    return shards
