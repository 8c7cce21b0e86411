"""Host links on paper: each rank has one in each direction, and transfers of a direction stand in line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megalite.schedule.action import EVICT, FETCH, INPUT_GRADIENT_KINDS, PREFETCH, Action

if TYPE_CHECKING:
    from megalite.schedule.chunks import ChunkKey, ChunkUse
    from megalite.schedule.simulate import Time


class Links:
    """When the transfers of a run begin and end."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, Action, Time, Time]] = []
        self._free: dict[tuple[int, str], Time] = {}
        self._arrived: dict[tuple[int, int, int], Time] = {}
        self._there: dict[ChunkKey, Time] = {}
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

    def read(
        self, rank: int, uses: Sequence[ChunkUse], sizes: Mapping[ChunkKey, int], span: tuple[Time, Time], byte: Time
    ) -> Time:
        """When a computation ends that reads weights layer by layer: each layer takes its part of the time, once its
        weights have come. span: when it starts, and how long it computes. byte: time of one on the link."""
        now, takes = span
        for use in uses:
            for key in use.come:
                begin = max(now, self._free.get((rank, PREFETCH), now))
                end = self._free[rank, PREFETCH] = begin + byte * sizes[key]
                self._there[key] = end
                self.spans.append((rank, Action(FETCH, key[0], key[2], replica=key[1]), begin, end))
            now = max([now, *(self._there[key] for key in use.wanted)]) + takes / len(uses)
        return now if uses else now + takes

    def ready(self, rank: int, action: Action, start: Time) -> Time:
        """When a computation may start: what it uses has come back, and what was sent before the computation ahead of
        it has left."""
        for part in action.computations():
            if part.kind in INPUT_GRADIENT_KINDS:
                start = max(start, self._arrived.get((part.stage, part.replica, part.microbatch), start))
        start = max(start, self._old.get(rank, 0))
        self._old[rank] = self._new.get(rank, 0)
        return start


TRANSFER_KINDS = frozenset({EVICT, PREFETCH})
