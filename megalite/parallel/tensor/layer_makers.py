"""Which constructor makes a layer: that of one tensor axis, or what `LayerContext.grid` has in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from megalite.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear


class LayerMakers(Protocol):
    """The constructors of layers in place of those of one axis, each with the arguments of its namesake."""

    column: Callable[..., Any]
    row: Callable[..., Any]
    norm: Callable[..., Any]
    words: Callable[..., Any]
    positions: Callable[..., Any]
    head: Callable[..., Any]
    stack: Callable[..., Any]

    def first_channel(self, hidden_size: int) -> int:
        """Number of the first feature of the residual stream that a rank has."""


def make_layer(kind: str, usual: Callable[..., Any], *given: Any, **how: Any) -> Any:
    """`usual(...)`, or the layer of this kind that the grid of the context has. The context is `ctx`, or given last."""
    grid = (how["ctx"] if "ctx" in how else given[-1]).grid
    return (usual if grid is None else getattr(grid, kind))(*given, **how)


def column_linear(in_features: int, out_features: int, **how: Any) -> ColumnParallelLinear:
    """A `ColumnParallelLinear`, or what is in its place."""
    layer: ColumnParallelLinear = make_layer("column", ColumnParallelLinear, in_features, out_features, **how)
    return layer


def row_linear(in_features: int, out_features: int, **how: Any) -> RowParallelLinear:
    """A `RowParallelLinear`, or what is in its place."""
    layer: RowParallelLinear = make_layer("row", RowParallelLinear, in_features, out_features, **how)
    return layer
