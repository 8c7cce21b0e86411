"""Grids of tensor-parallel ranks in the parallel section."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.config.schema import Spelled, option

GridShape = tuple[int, int, int]
MODES = ("1d", "2d", "2.5d", "3d", "4d")


@dataclass(frozen=True, kw_only=True)
class TensorGrid(Spelled):
    """How `tensor_model_parallel_size` ranks share a layer."""

    tensor_parallel_mode: str = option(
        "1d",
        "1d: each matrix is cut along one side; else ranks form a grid of inner x outer x token sides: 2d 1 x q x q, "
        "2.5d 1 x q x dq, 3d q x q x q, 4d as `tensor_parallel_grid` says",
        choices=MODES,
    )
    tensor_parallel_grid: tuple[int, ...] | None = option(
        None, "of 4d: ranks that share the inputs, the outputs and the tokens of a layer", ge=1
    )

    @property
    def is_grid(self) -> bool:
        """Whether ranks form a grid."""
        return self.tensor_parallel_mode != "1d"

    def shape(self, ranks: int) -> GridShape | None:
        """X, Y, Z of so many ranks; None where they make no such grid, or none is asked for."""
        found, given = grids_of(self.tensor_parallel_mode, ranks), self.tensor_parallel_grid or ()
        if self.tensor_parallel_mode == "4d" and len(given) == 3:
            found = [(given[0], given[1], given[2])]
        return next((shape for shape in found if math.prod(shape) == ranks), None)


def grids_of(mode: str, most: int) -> list[GridShape]:
    """The grids of a mode with at most so many ranks, those with the largest q first; of 2.5d 1 < d <= q."""
    sides = range(int(most**0.5) + 1, 1, -1)
    shapes: dict[str, list[GridShape]] = {
        "2d": [(1, q, q) for q in sides],
        "2.5d": [(1, q, d * q) for q in sides for d in range(2, q + 1)],
        "3d": [(q, q, q) for q in sides],
    }
    return [shape for shape in shapes.get(mode, []) if math.prod(shape) <= most]
