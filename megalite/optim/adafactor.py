"""Adafactor: AdamW's second moment in a row and a column of numbers for each matrix, and no first moment.

    R = decayed mean of g^2 over columns, [rows]          V = R C / mean(R): the best product of a row and a column
    C = decayed mean of g^2 over rows,    [columns]       in the divergence of Shazeer and Stern (arXiv 1804.04235)

    decay  1 - t^-0.8: the first step takes the gradient as it is, later ones forget more and more slowly
    u = g / sqrt(V),  scaled down to a root mean square of 1 where it is larger
    p = p - lr * (u + weight_decay * p),  lr times max(0.001, root mean square of p) with `scale_parameter`

With `scale_parameter` the decay is relative, too, as in transformers' Adafactor: of a matrix whose root mean square is
0.02, a step takes lr * 0.02 * weight_decay.

Norms and biases keep all of V. Statistics are small (rows + columns), so every rank that holds a slice of a parameter
holds all of them: each adds up the squares that lie in its slice, and one message sums them over the slices. No
parameter has to lie in one piece, and the result is that of one process (to rounding: sums run in another order).

Each expert of a stack is a parameter of its own: its root mean squares are over its elements alone.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.comm import Axis, FlatPiece, Statistic, all_reduce_, device_of, range_to_rectangles
from megalite.config import OptimizerConfig
from megalite.gradient import sum_of_squares
from megalite.inventory import DEALT, Box, BufferParameter
from megalite.optim.rule import ParamGroup, UpdateRule

DECAY_EXPONENT = 0.8
CLIP = 1.0
EPSILON = 1e-30
"""Added to squares: a gradient of zero gives an update of zero, not 0 / 0."""
SMALLEST_SIZE = 1e-3
"""A parameter that is zero must be able to leave it (`scale_parameter`)."""


class _Mean:
    """A decayed mean of squares of one parameter, over dimension `over` (None: of every element by itself).

    values: this rank's rows or columns. partial: other ranks of the axis that cuts it hold a part of what is averaged.
    """

    def __init__(self, label: str, parameter: BufferParameter, over: int | None, cut: int | None) -> None:
        shape, whole = parameter.shape, parameter.placement.global_shape
        self.label = label
        self.kept = tuple(d for d in range(len(shape)) if d != over)
        self.count = 1 if over is None else whole[over]
        self.partial = cut is not None and over == cut
        self.sharded = parameter.placement.sharded & DEALT if self.partial else parameter.placement.sharded
        self.shape = tuple(shape[d] for d in self.kept)
        self.over = over
        self.values = torch.empty(0)
        self.sums = torch.empty(0)

    def place(self, rectangle: Box) -> tuple[slice, ...]:
        """Slices of `values` for a rectangle of the parameter."""
        return tuple(slice(rectangle.offset[d], rectangle.offset[d] + rectangle.shape[d]) for d in self.kept)


class _Tracked:
    """A parameter of which some rank of the shard axis holds each part: its statistics and two sums a step.

    number: how many of its experts this rank has; 1 of any other parameter.
    first: the number of its first sum. numel: of one expert, on all ranks of the axis that cuts it.
    """

    def __init__(self, parameter: BufferParameter, cut: int | None, first: int) -> None:
        place = parameter.placement
        dims = len(parameter.shape)
        stacked = place.family == "expert"
        self.parameter = parameter
        self.partial = cut is not None
        self.first, self.number = first, parameter.shape[0] if stacked else 1
        self.numel = math.prod(place.global_shape[stacked:])
        if dims < 2 or not place.decay:  # a bias of two rows is not a matrix
            self.means = [_Mean("exp_avg_sq", parameter, None, cut)]
        else:
            self.means = [
                _Mean("exp_avg_sq_row", parameter, dims - 1, cut),
                _Mean("exp_avg_sq_col", parameter, dims - 2, cut),
            ]
        # mean(R) = mean(C); the one is on this rank from end to end whose dimension is not cut
        self.mean_of = 0 if cut == dims - 1 else 1

    def factors(self) -> list[Tensor]:
        """Factors of a gradient, one for each of `means`: the product of all is 1 / sqrt(V)."""
        if len(self.means) == 1:
            return [self.means[0].values.rsqrt()]
        rows, columns = (mean.values for mean in self.means)
        average = self.means[self.mean_of].values.mean(-1, keepdim=True)
        return [(rows / average).rsqrt(), columns.rsqrt()]

    def split(self, piece: FlatPiece) -> Iterator[tuple[int, FlatPiece]]:
        """The piece expert by expert, and the number of the sum that each belongs to."""
        size = math.prod(self.parameter.shape) // self.number
        for index in range(piece.start // size, -(-piece.stop // size)):
            begin, end = max(piece.start, index * size), min(piece.stop, (index + 1) * size)
            yield self.first + index, FlatPiece(piece.parameter, begin, end, piece.at + begin - piece.start)


class Adafactor(UpdateRule):
    """Adafactor over flat slices; with `adafactor_scale_parameter` the learning rate is relative to the size of each
    parameter (the paper's relative step).

    groups: flat ones (`pieces`, `parameters` and `shard_axis` say what lies in each tensor, and who has the rest;
    `cut_axes`, of which one at most is longer than 1, what cuts parameters, besides one that deals out experts).
    """

    def __init__(self, groups: list[ParamGroup], settings: OptimizerConfig) -> None:
        super().__init__(groups)
        self.shard_axis: Axis = groups[0]["shard_axis"]
        cutting = [axis for axis in groups[0]["cut_axes"] if axis.size > 1 and axis.name not in DEALT]
        assert len(cutting) < 2, "statistics of a matrix that two axes cut"
        self.cut_axis = cutting[0] if cutting else Axis.single("cut")
        self.talks = self.shard_axis.size > 1 or self.cut_axis.size > 1
        self.scale_parameter = settings.args.adafactor_scale_parameter
        self.device, self.dtype = groups[0]["params"][0].device, groups[0]["params"][0].dtype
        parameters: list[BufferParameter] = groups[0]["parameters"]
        self.tracked: list[_Tracked] = []
        first = 0
        for parameter in parameters:
            self.tracked.append(_Tracked(parameter, cut_dimension(parameter, self.cut_axis), first))
            first += self.tracked[-1].number
        self._is_cut = torch.tensor([t.partial for t in self.tracked for _ in range(t.number)], device=self.device)
        numels = [t.numel for t in self.tracked for _ in range(t.number)]
        self._numels = torch.tensor(numels, dtype=torch.float64, device=self.device)
        # in one buffer, so that one message carries them; what ranks of the cutting axis add up comes first
        means = sorted((mean for t in self.tracked for mean in t.means), key=lambda mean: not mean.partial)
        sizes = [math.prod(mean.shape) for mean in means]
        self._values, self._sums = (torch.zeros(sum(sizes), dtype=self.dtype, device=self.device) for _ in range(2))
        for mean, values, sums in zip(means, self._values.split(sizes), self._sums.split(sizes), strict=True):
            mean.values, mean.sums = values.view(mean.shape), sums.view(mean.shape)
        self._partial = sum(mean.values.numel() for mean in means if mean.partial)

    def statistics(self) -> Iterator[Statistic]:
        """The state: the same on every rank of the shard axis."""
        for number, tracked in enumerate(self.tracked):
            for mean in tracked.means:
                yield Statistic(mean.label, number, mean.kept, mean.values, mean.sharded)

    @torch.no_grad()
    def step(self) -> None:
        decay = 1.0 - max(1.0, self.steps + 1.0) ** -DECAY_EXPONENT
        self._sums.zero_()
        sizes = self._add_up(self._square)
        self._reduce(self._sums, self._partial)
        for tracked in self.tracked:
            for mean in tracked.means:
                squares = mean.sums.div_(mean.count).add_(EPSILON)
                self.write(mean.values, mean.values.mul(decay).add_(squares, alpha=1.0 - decay))
        self._factors = [tracked.factors() for tracked in self.tracked]
        updates = self._add_up(self._divide)
        for group in self.param_groups:
            rates = group["lr"] / (updates / CLIP).clamp(min=1.0)
            relative = sizes.clamp(min=SMALLEST_SIZE)
            shrink = group["lr"] * group["weight_decay"]
            each = scalars(rates * relative if self.scale_parameter else rates)
            kept = scalars(1.0 - shrink * relative)
            for p, pieces in zip(group["params"], group["pieces"], strict=True):
                new = p.clone() if self.scale_parameter else p * (1.0 - shrink)
                for number, piece in self._split(pieces):
                    if self.scale_parameter:
                        _own(new, piece).mul_(kept[number])
                    subtract_scaled(_own(new, piece), _own(p.grad, piece), each[number])
                self.write(p, new)
                del new  # the next one's has its place
        self._factors = []
        self.steps += 1

    def _split(self, pieces: Sequence[FlatPiece]) -> Iterator[tuple[int, FlatPiece]]:
        for piece in pieces:
            yield from self.tracked[piece.parameter].split(piece)

    def _add_up(self, measure: Any) -> Tensor:
        """The root mean square of every parameter and expert (fp64), from what `measure(tensor, piece)` says is its sum
        of squares."""
        sums = torch.zeros_like(self._numels)
        for group in self.param_groups:
            for p, pieces in zip(group["params"], group["pieces"], strict=True):
                for number, piece in self._split(pieces):
                    sums[number] += measure(p, piece)
        all_reduce_on_axis(sums, self.shard_axis)
        if self.cut_axis.size > 1:
            parts = sums * self._is_cut
            all_reduce_on_axis(parts, self.cut_axis)
            sums = torch.where(self._is_cut, parts, sums)
        return (sums / self._numels).sqrt()

    def _square(self, p: Tensor, piece: FlatPiece) -> Tensor:
        """Adds the squared gradient to the statistics; returns the parameter's own sum of squares."""
        tracked = self.tracked[piece.parameter]
        for rectangle, values in _rectangles(p.grad, piece, tracked.parameter):
            squared = values.square()
            for mean in tracked.means:
                mean.sums[mean.place(rectangle)] += squared if mean.over is None else squared.sum(mean.over)
        return sum_of_squares([_own(p, piece)])

    def _divide(self, p: Tensor, piece: FlatPiece) -> Tensor:
        """Turns the gradient into the update, in place; returns its sum of squares."""
        tracked = self.tracked[piece.parameter]
        for rectangle, values in _rectangles(p.grad, piece, tracked.parameter):
            for mean, factor in zip(tracked.means, self._factors[piece.parameter], strict=True):
                part = factor[mean.place(rectangle)]
                values.mul_(part if mean.over is None else part.unsqueeze(mean.over))
        return sum_of_squares([_own(p.grad, piece)])

    def _reduce(self, sums: Tensor, partial: int) -> None:
        all_reduce_on_axis(sums, self.shard_axis)
        if partial:
            all_reduce_on_axis(sums[:partial], self.cut_axis)


def cut_dimension(parameter: BufferParameter, axis: Axis) -> int | None:
    """The dimension that an axis cuts. Only a padded vocabulary, dimension 0, can look whole where it is cut."""
    place = parameter.placement
    if not place.sharded & axis.names:
        return None
    stacked = place.family == "expert"  # whose dimension 0 is dealt out
    sizes = zip(parameter.shape, place.global_shape, strict=True)
    return next((d for d, (have, whole) in enumerate(sizes) if have != whole and d >= stacked), 0)


def all_reduce_on_axis(x: Tensor, axis: Axis) -> None:
    """`all_reduce_` of a tensor that may be in host memory while the axis connects devices."""
    sent = x.to(device_of(axis)) if axis.size > 1 else x
    all_reduce_(sent, axis)
    if sent is not x:
        x.copy_(sent)


def scalars(x: Tensor) -> Sequence[float | Tensor]:
    """The elements of `[n]`: numbers where they are in host memory, which nobody waits for, else 0-dim tensors."""
    return x.numpy().tolist() if x.device.type == "cpu" else x.unbind()


def subtract_scaled(target: Tensor, x: Tensor, factor: float | Tensor) -> None:
    """target -= factor x."""
    if isinstance(factor, Tensor):
        target.addcmul_(x, factor.to(target.dtype), value=-1.0)
    else:
        target.add_(x, alpha=-factor)


def _own(flat: Tensor | None, piece: FlatPiece) -> Tensor:
    """The part of a flat tensor that a piece covers."""
    assert flat is not None
    return flat[piece.at : piece.at + piece.stop - piece.start]


def _rectangles(flat: Tensor | None, piece: FlatPiece, parameter: BufferParameter) -> Iterator[tuple[Box, Tensor]]:
    """The rectangles of a parameter that a piece of a flat tensor covers, and their values."""
    boxes = range_to_rectangles(parameter.shape, piece.start, piece.stop)
    for box, part in zip(boxes, _own(flat, piece).split([box.numel for box in boxes]), strict=True):
        yield box, part.view(box.shape)
