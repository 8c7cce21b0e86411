"""The axes of a grid, and what its ranks send one another: parts of features, of weights and of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from megalite.comm import Axis, ParallelMesh, all_gather, all_to_all, conjugates, reduce_scatter
from megalite.gradient import into_sink


@dataclass(frozen=True)
class Grid:
    """X x Y x Z tensor-parallel ranks: rank x + X (y + Y z) of the tensor axis is (x, y, z).

    inner: X, cuts the inputs of column layers and the outputs of row layers.
    outer: Y, cuts the outputs of column layers and the inputs of row layers.
    tokens: Z, cuts the samples of a micro-batch; each weight is dealt out over it.
    columns: X and Y together, which cut the features of a token.
    ranks: all, in the order in which they hold the vocabulary; it has no group.
    """

    inner: Axis
    outer: Axis
    tokens: Axis
    columns: Axis
    ranks: Axis

    @classmethod
    def of(cls, mesh: ParallelMesh, shape: tuple[int, int, int]) -> Grid:
        """That of `shape` = (X, Y, Z) over the tensor axis. Collective at first use."""
        x, y, z = shape
        wide, size = x * y, x * y * z
        assert mesh.size("tp") == size, f"{mesh.size('tp')} tensor-parallel ranks are no grid of {shape}"

        def axis(name: str, starts: list[int], step: int, count: int) -> Axis:
            found = mesh.over(
                "tp", apart=f"grid_{name}", parts=lambda ranks: [ranks[i : i + step * count : step] for i in starts]
            )
            return replace(found, name="tp")

        inner = axis("inner", list(range(0, size, x)), 1, x)
        outer = axis("outer", [i + wide * k for k in range(z) for i in range(x)], x, y)
        tokens = axis("tokens", list(range(wide)), wide, z)
        columns = axis("columns", list(range(0, size, wide)), 1, wide)
        everyone = replace(mesh["tp"], rank=columns.rank * z + tokens.rank, group=None, shared=None)
        return cls(inner, outer, tokens, columns, everyone)

    def features(self, size: int) -> slice:
        """This rank's part of `size` features of the residual stream."""
        width = size // self.columns.size
        begin = width * (self.inner.rank * self.outer.size + self.outer.rank)
        return slice(begin, begin + width)


def gathered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The ranks' x one after the other along `dim` (negative)."""
    if axis.size == 1:
        return x
    return all_gather(x[None], axis).movedim(0, dim - 1).flatten(dim - 1, dim)


def summed(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part along `dim` (negative) of the sum of the ranks' x."""
    if axis.size == 1:
        return x
    return reduce_scatter(x.unflatten(dim, (axis.size, -1)).movedim(dim - 1, 0).contiguous(), axis)[0]


def gather_parameter(parameter: Tensor, axis: Axis, dim: int) -> Tensor:
    """The parts of a parameter along `dim` (negative) together; its gradient, summed over the axis, goes to its
    sink."""
    whole = into_sink(parameter)
    return whole if axis.size == 1 else conjugates(whole, axis, partial(gathered, dim=dim), partial(summed, dim=dim))


def features_to_tokens(x: Tensor, grid: Grid) -> Tensor:
    """The residual stream with all features of a part of the sequence: `[s, b, h/XY]` -> `[s/XY, b, h]`."""
    return conjugates(x, grid, _to_tokens, _to_features)


def sum_to_features(x: Tensor, grid: Grid) -> Tensor:
    """`[s, b, h]`, of which each of X Y ranks has an addend -> its features of the sum, `[s, b, h/XY]`."""
    return conjugates(x, grid, _sum_features, _all_features)


def _joined(parts: Tensor, grid: Grid) -> Tensor:
    """Features `[XY, ..., n]` of ranks in the order of `columns` -> `[..., X Y n]`, in that of the residual stream."""
    split = parts.unflatten(0, (grid.outer.size, grid.inner.size))
    joined: Tensor = split.movedim((1, 0), (-3, -2)).flatten(-3)
    return joined


def _parted(x: Tensor, grid: Grid) -> Tensor:
    """The reverse."""
    split = x.unflatten(-1, (grid.inner.size, grid.outer.size, -1))
    parted: Tensor = split.movedim((-3, -2), (1, 0)).flatten(0, 1).contiguous()
    return parted


def _to_tokens(x: Tensor, grid: Grid) -> Tensor:
    return _joined(all_to_all(x.unflatten(0, (grid.columns.size, -1)), grid.columns), grid)


def _to_features(x: Tensor, grid: Grid) -> Tensor:
    return all_to_all(_parted(x, grid), grid.columns).flatten(0, 1)


def _sum_features(x: Tensor, grid: Grid) -> Tensor:
    return reduce_scatter(_parted(x, grid), grid.columns)[0]


def _all_features(x: Tensor, grid: Grid) -> Tensor:
    return _joined(all_gather(x[None], grid.columns), grid)
