"""Host links on paper: each rank has one in each direction, and transfers of a direction stand in line."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from megalite.schedule.action import BACKWARD, BACKWARD_INPUT, EVICT, PREFETCH, Action

if TYPE_CHECKING:
    from megalite.schedule.simulate import Time


class Links:
    """When the transfers of a run begin and end."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, Action, Time, Time]] = []
        self._free: dict[tuple[int, str], Time] = {}
        self._arrived: dict[tuple[int, int, int], Time] = {}
        self._new: dict[int, Time] = {}
        self._old: dict[int, Time] = {}

    def start(self, rank: int, action: Action, now: Time, takes: Time) -> None:
        """An EVICT or a PREFETCH is issued."""
        begin = max(now, self._free.get((rank, action.kind), now))
        end = self._free[rank, action.kind] = begin + takes
        self.spans.append((rank, action, begin, end))
        if action.kind == PREFETCH:
            self._arrived[action.stage, action.replica, action.microbatch] = end
        else:
            self._new[rank] = end

    def ready(self, rank: int, action: Action, start: Time) -> Time:
        """When a computation may start: what it uses has come back, and what was sent before the computation ahead of
        it has left."""
        for part in action.computations():
            if part.kind in (BACKWARD, BACKWARD_INPUT):
                start = max(start, self._arrived.get((part.stage, part.replica, part.microbatch), start))
        start = max(start, self._old.get(rank, Fraction(0)))
        self._old[rank] = self._new.get(rank, Fraction(0))
        return start


TRANSFER_KINDS = frozenset({EVICT, PREFETCH})
