"""Which constructor makes a layer: that of one tensor axis, or what `LayerContext.grid` has in its place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from megalite.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

Layer = TypeVar("Layer")


def make_layer(kind: str, usual: Callable[..., Layer], *given: Any, **how: Any) -> Layer:
    """`usual(...)`, or the layer of this kind that the grid of the context has. The context is `ctx`, or given last."""
    grid = (how["ctx"] if "ctx" in how else given[-1]).grid
    layer: Layer = (usual if grid is None else grid[kind])(*given, **how)
    return layer


column_linear = partial(make_layer, "column", ColumnParallelLinear)
row_linear = partial(make_layer, "row", RowParallelLinear)
