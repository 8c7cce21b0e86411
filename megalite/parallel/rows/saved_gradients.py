"""Gradients of rows that have left the cache before the end of their batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megalite.parallel.rows.host_rows import Rows

ABSENT = -1


class SavedGradients:
    """In host memory, `[rows that have left, h]`. A row that comes back takes its sum so far with it."""

    def __init__(self, count: int, columns: int, dtype: torch.dtype) -> None:
        self._values = torch.empty(0, columns, dtype=dtype)
        self._place_of = np.full(count, ABSENT)
        self._used = 0
        self._here = np.zeros(count, bool)

    def put(self, rows: Rows, gradient: Tensor) -> None:
        """`[n, h]`, on the host."""
        new = rows[self._place_of[rows] == ABSENT]
        self._place_of[new] = np.arange(self._used, self._used + len(new))
        self._used += len(new)
        if self._used > len(self._values):
            larger = self._values.new_empty(max(self._used, 2 * len(self._values)), self._values.shape[1])
            larger[: len(self._values)] = self._values
            self._values = larger
        self._values.index_copy_(0, torch.from_numpy(self._place_of[rows]), gradient)
        self._here[rows] = True

    def of(self, rows: Rows) -> tuple[Rows, Tensor]:
        """(Those of `rows` whose gradient is here, their gradients)."""
        found = rows[self._here[rows]]
        return found, self._values.index_select(0, torch.from_numpy(self._place_of[found]))

    def leave(self, rows: Rows) -> None:
        """Their gradients are in the cache again."""
        self._here[rows] = False

    def clear(self) -> None:
        """A new batch begins."""
        self._used = 0
        self._here[:] = False
        self._place_of[:] = ABSENT
