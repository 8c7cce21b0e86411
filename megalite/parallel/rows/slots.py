"""Which row is where in the cache, and which one leaves: the one whose next use is the farthest. Uses to come are
known as far as batches are: the sampler is pure, and a program says in which order a rank works."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.parallel.rows.host_rows import Rows
from megalite.schedule import belady

EMPTY = -1
NEVER = 2**63 - 1


@dataclass(frozen=True)
class Access:
    """One use of a micro-batch's rows. forward: their weights are read; else gradients are added to them."""

    microbatch: int
    forward: bool


class Future:
    """The uses to come, in order.

    count: number of rows.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._accesses: list[Access] = []
        self._rows: dict[int, Rows] = {}
        self._place = self._next_update = self._batch = 0

    def announce(self, order: Sequence[Access], size: int, first: int, rows: Sequence[Rows]) -> None:
        """A batch of `size` micro-batches begins at number `first`. rows: of these and of those that follow.

        order: of its uses on this rank, with `first` as number 0; the batches that follow are taken for alike.
        """
        known = len(rows)
        self._rows = dict(enumerate(rows, first))
        self._place, self._next_update, self._batch = 0, len(order), len(order)
        self._accesses = [
            Access(first + start + access.microbatch, access.forward)
            for start in range(0, known, size)
            for access in order
            if start + access.microbatch < known
        ]

    def advance(self) -> None:
        """The next use has been made."""
        self._place += 1

    def update(self) -> None:
        """The optimizer has stepped; the uses from here on are of the next batch."""
        self._next_update += self._batch

    def next_uses(self) -> NDArray[np.int64]:
        """`[count]`: the place of each row's next use; `NEVER` if none is known."""
        places = np.full(self._count, NEVER)
        for place in range(len(self._accesses) - 1, self._place - 1, -1):
            places[self._rows[self._accesses[place].microbatch]] = place
        return places

    def ahead(self, microbatches: int) -> Iterator[tuple[int, Rows, bool]]:
        """(Place, rows, whether no update comes before it) of the forwards of the next so many micro-batches."""
        for place in range(self._place, len(self._accesses)):
            if not microbatches:
                return
            if self._accesses[place].forward:
                yield place, self._rows[self._accesses[place].microbatch], place < self._next_update
                microbatches -= 1

    @property
    def backwards(self) -> int:
        """In a batch on this rank, at least 1."""
        return max(1, sum(not access.forward for access in self._accesses[: self._batch]))

    @property
    def forward_follows(self) -> bool:
        """Whether the next use is a forward: no backward comes before it, behind which rows could arrive."""
        return self._place < len(self._accesses) and self._accesses[self._place].forward


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
