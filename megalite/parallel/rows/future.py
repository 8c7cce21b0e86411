"""Uses of rows to come, as far as known: the sampler is pure, and a program says in which order a rank works."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalite.parallel.rows.host_rows import Rows

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
