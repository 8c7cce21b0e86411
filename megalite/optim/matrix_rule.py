"""The base of rules for whole matrices: AdamW for everything else, and the parts of a matrix that an axis cuts."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from megalite.comm import Axis, Statistic, all_gather
from megalite.config import OptimizerConfig
from megalite.inventory import DEALT, ParameterPlacement
from megalite.optim.adamw import AdamW
from megalite.optim.rule import ParamGroup


class MatrixRule(AdamW):
    """A rule of its own for groups with `whole`, AdamW for the others.

    `whole` groups hold tensors in their parameter's local shape, their `placements` and the `cut_axes`.
    matrix_moments: names of what it keeps of a matrix, in its shape.
    """

    matrix_moments: ClassVar[Sequence[str]]

    def __init__(self, groups: list[ParamGroup], settings: OptimizerConfig) -> None:
        super().__init__(groups, settings)
        self.args = settings.args
        self.talks = any(axis.size > 1 for group in groups if group.get("whole") for axis in group.get("cut_axes", ()))

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        for p, grad, group, index in self.with_gradients():
            if not group["whole"]:
                continue
            state = self.state[p]
            if not state:
                state.update({name: torch.zeros_like(p) for name in self.matrix_moments})
            if self.steps >= 0:
                self.update_matrix(p, grad, group, group["placements"][index])
        self.steps += 1

    def update_matrix(self, p: Tensor, grad: Tensor, group: ParamGroup, placement: ParameterPlacement) -> None:
        """Updates a matrix, or this rank's part of it."""
        raise NotImplementedError

    def foresees(self, group: ParamGroup) -> bool:
        return not group["whole"]  # a matrix would have to be gathered and worked out once more

    def members(self, *fields: str) -> Iterator[tuple[Any, ...]]:
        """What these fields of the `whole` groups have of each matrix."""
        for group in self.param_groups:
            if group["whole"]:
                yield from zip(*(group[field] for field in fields), strict=True)

    def kept_of(self, p: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        """(Label, side: -2 rows, -1 columns, values `[..., n, k]`) of what is kept of a matrix beside its moments."""
        yield from ()

    def statistics(self) -> Iterator[Statistic]:
        """That, by the `pieces` of the groups: whole on every rank that holds a part of the matrix."""
        for p, pieces, placement in self.members("params", "pieces", "placements"):
            for label, side, values in self.kept_of(p):
                kept = (*range(values.dim() - 2), p.dim() + side, p.dim() + side)
                dealt, width = placement.sharded & DEALT, values.shape[-1]
                yield Statistic(label, pieces[0].parameter, kept, values, dealt, True, width)


class TwoSidedRule(MatrixRule):
    """A rule that keeps the same of both sides of a matrix: named tuples of `dim` (-2 rows, -1 columns) and tensors."""

    sides: dict[Tensor, list[Any]]

    def __init__(self, groups: list[ParamGroup], settings: OptimizerConfig) -> None:
        super().__init__(groups, settings)
        self.sides = {}
        for p, place in self.members("params", "placements"):
            both = [self.side_of(p, dim, place.global_shape[dim]) for dim in (-2, -1)]
            self.sides[p] = [side for side in both if side is not None]

    def side_of(self, p: Tensor, dim: int, n: int) -> Any:
        """What is kept of a side, n long, before its first gradient; None: nothing."""
        raise NotImplementedError

    def kept_of(self, p: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        for dim, *values in self.sides[p]:
            for label, value in zip(self.sides[p][0]._fields[1:], values, strict=True):
                yield f"{'left' if dim == -2 else 'right'}_{label}", dim, value

    def finite(self, grad: Tensor) -> Tensor:
        """Zeros for a gradient that is not: it has no eigenvalues, and nothing of it is kept."""
        return grad if self.found_inf is None else torch.where(self.found_inf > 0, 0.0, grad)


def gather_matrix(
    local: Tensor, placement: ParameterPlacement, cut_axes: Sequence[Axis]
) -> tuple[Tensor, int, Axis | None]:
    """(the whole matrix, the dimension that is cut, the axis that cuts it: None where none does). Of stacked matrices
    each rank keeps those that it has."""
    sizes = list(zip(local.shape, placement.global_shape, strict=True))
    cut = [d for d, (have, total) in enumerate(sizes) if have != total and d >= local.dim() - 2]
    if not cut:
        return local, 0, None
    axes = [axis for axis in cut_axes if axis.name in placement.sharded - DEALT]
    assert len(axes) == len(cut) == 1, "a matrix is cut along one dimension, and gathered over one axis"
    return side_by_side(local, axes[0], cut[0]), cut[0], axes[0]


def side_by_side(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The ranks' x one after the other along `dim`."""
    return all_gather(x.transpose(0, dim).contiguous(), axis).transpose(0, dim)


def own_part(whole: Tensor, dim: int, axis: Axis | None) -> Tensor:
    """This rank's part of a matrix that the axis cuts along `dim`: the inverse of `gather_matrix`."""
    return whole if axis is None else whole.chunk(axis.size, dim)[axis.rank]
