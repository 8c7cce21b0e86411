"""Checks, use by use, that a cache of rows computes what memory without one would.

came      a row entered the cache, with the values of this moment
left      it left without a gradient          saved     it left, and its gradient went to the host
read      a forward reads its weights         added     a backward adds to its gradient
updated   the optimizer has stepped; it was given the gradients of these rows      skipped   it has left out a step
"""

import numpy as np

from megalite.errors import RuntimeFailure
from megalite.parallel.rows.host_rows import Rows

OUT = -1


class StalenessCheck:
    """Sees everything that happens to a cache of `size` slots for `count` rows.

    Raises RuntimeFailure for a use of a row that is not there or lacks an update, a gradient that is lost, and more
    rows than slots.
    """

    def __init__(self, size: int, count: int) -> None:
        self._size, self._updates = size, 0
        self._version = np.full(count, OUT)  # updates that the cached values have seen
        self._has_gradient = np.zeros(count, bool)

    def see(self, event: str, rows: Rows) -> None:
        """Something happens to some rows."""
        version, held = self._version, self._version[rows] != OUT
        if event == "came":
            self._require(event, rows, ~held, "is in the cache already")
            version[rows] = self._updates
            if (present := int((version != OUT).sum())) > self._size:
                raise RuntimeFailure(f"cached embedding: {present} rows in {self._size} slots")
        elif event in ("left", "saved"):
            self._require(event, rows, held, "is not in the cache")
            if event == "left":
                self._require(event, rows, ~self._has_gradient[rows], "takes a gradient with it that is lost")
            version[rows] = OUT
        elif event == "skipped":
            self._has_gradient[:] = False
        elif event == "updated":
            lost = self._has_gradient.copy()
            lost[rows] = False
            self._require(event, np.flatnonzero(lost), np.zeros(int(lost.sum()), bool), "has a gradient that is lost")
            self._has_gradient[:] = False
            self._updates += 1
        else:
            self._require(event, rows, held, "is not in the cache")
            self._require(event, rows, version[rows] == self._updates, "lacks an update")
            self._has_gradient[rows] |= event == "added"

    def _require(self, event: str, rows: Rows, holds: np.typing.NDArray[np.bool_], otherwise: str) -> None:
        if not holds.all():
            row = rows[~holds][0]
            raise RuntimeFailure(f"cached embedding, update {self._updates}, {event}: row {row} {otherwise}")
