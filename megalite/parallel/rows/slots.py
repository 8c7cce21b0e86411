"""Which row is where in the cache, and which one leaves: the one whose next use is the farthest."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.parallel.rows.host_rows import Rows
from megalite.schedule import belady

EMPTY = -1


class Moves(NamedTuple):
    """Rows that leave the cache and rows that enter it, with the slots of both."""

    leaving: Rows
    left: NDArray[np.int64]
    entering: Rows
    entered: NDArray[np.int64]


class Slots:
    """The table of a cache of `size` slots for `count` rows; no tensor is touched."""

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self.slot_of = np.full(count, EMPTY)
        self.row_in = np.full(size, EMPTY)

    def missing(self, rows: Rows) -> Rows:
        """Rows that are not in the cache."""
        found: Rows = rows[self.slot_of[rows] == EMPTY]
        return found

    def admit(self, rows: Rows, next_uses: Callable[[], NDArray[np.int64]], *, before: int | None = None) -> Moves:
        """Makes room for `rows`.

        next_uses: place of every row's next use; asked for where some must leave.
        before: place of the use for which they come. Rows that are used no later stay, and of `rows` as many come as
            find room. None: they are used now and all come.
        """
        entering, free = self.missing(rows), np.flatnonzero(self.row_in == EMPTY)
        lacking = len(entering) - len(free)
        leaving = np.zeros(0, np.int64)
        if lacking > 0:
            uses = next_uses()
            stays = np.zeros(len(self.slot_of), bool)
            stays[rows] = True
            held = self.row_in[self.row_in != EMPTY]
            may_leave = held[~stays[held] & (True if before is None else uses[held] > before)]
            # Thousands of rows share a few next uses, so the choice is among the uses.
            times, which, counts = np.unique(uses[may_leave], return_inverse=True, return_counts=True)
            farthest = belady(times.tolist(), counts.tolist(), held=lacking, room=0)
            leaving = np.sort(np.concatenate([leaving, *(may_leave[which == time] for time in farthest)])[:lacking])
        left = self.slot_of[leaving]
        self.slot_of[leaving], self.row_in[left] = EMPTY, EMPTY
        entered = np.sort(np.concatenate([free, left]))[: len(entering)]
        entering = entering[: len(entered)]
        self.slot_of[entering], self.row_in[entered] = entered, entering
        assert before is not None or not len(self.missing(rows)), f"{len(rows)} rows at once in {self.size} slots"
        return Moves(leaving, left, entering, entered)

    def clear(self) -> None:
        """Empties the cache."""
        self.slot_of[:] = self.row_in[:] = EMPTY
