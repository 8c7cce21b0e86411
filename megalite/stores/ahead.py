"""Ranges of one object, read before they are asked for: neighbours merged, several requests at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from megalite.stores.store import PART_BYTES
from megalite.stores.url import StoreUrl

AT_ONCE = 8


def merged(ranges: Iterable[tuple[int, int]], *, most: int = PART_BYTES, gap: int = 0) -> list[tuple[int, int]]:
    """Ranges in rising order as fewer, of at most `most` bytes each unless one alone is longer; `gap` unused bytes
    between two neighbours are read with them."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] <= start <= found[-1][1] + gap and stop - found[-1][0] <= most:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


class RangesAhead:
    """Serves `read` for the given ranges of an object, in their order. Memory: `at_once` requests of 16 MiB."""

    def __init__(self, url: StoreUrl, ranges: Sequence[tuple[int, int]], at_once: int = AT_ONCE) -> None:
        self._url = url
        self._left = deque(merged(ranges))
        self._at_once = at_once
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="read-ahead")
        self._coming: deque[tuple[int, int, Future[bytes]]] = deque()
        self._now: tuple[int, int, bytes] = 0, 0, b""
        self._fill()

    def _fill(self) -> None:
        while self._left and len(self._coming) < self._at_once:
            start, stop = self._left.popleft()
            self._coming.append((start, stop, self._pool.submit(self._url.store.read, self._url.key, start, stop)))

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes `start:stop`; what was not announced is read at once."""
        while not self._now[0] <= start <= stop <= self._now[1]:
            if not self._coming or start < self._coming[0][0]:
                return memoryview(self._url.store.read(self._url.key, start, stop))
            first, last, future = self._coming.popleft()
            self._now = first, last, future.result()
            self._fill()
        first = self._now[0]
        return memoryview(self._now[2])[start - first : stop - first]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
