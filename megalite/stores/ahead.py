"""Ranges of one object, read before they are asked for: neighbours merged, several requests at once."""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from megalite.stores.store import PART_BYTES
from megalite.stores.url import StoreUrl

AT_ONCE = 8
MOST_ANNOUNCED = 1 << 16
"""Pieces that are remembered; older ones, which nobody has read (a batch that was passed over), are dropped."""


def merged(pieces: Iterable[tuple[int, int]], *, most: int = PART_BYTES, gap: int = 0) -> list[list[tuple[int, int]]]:
    """Pieces (start, stop) in rising order by requests, of at most `most` bytes each unless one piece is longer; `gap`
    unused bytes between two neighbours are read with them."""
    found: list[list[tuple[int, int]]] = []
    for start, stop in pieces:
        end = found[-1][-1][1] if found else -1
        if found and end <= start <= end + gap and stop - found[-1][0][0] <= most:
            found[-1].append((start, stop))
        else:
            found.append([(start, stop)])
    return found


class RangesAhead:
    """Serves pieces of an object that were announced, each once; what was not announced is read at once. at_once:
    requests. most: bytes that are fetched before somebody reads them."""

    def __init__(
        self, url: StoreUrl, at_once: int = AT_ONCE, most: float = AT_ONCE * PART_BYTES, name: str = "read-ahead"
    ) -> None:
        self._url, self._most = url, most
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix=name)
        self._left: deque[list[tuple[int, int]]] = deque()
        self._coming: OrderedDict[tuple[int, int], tuple[Future[bytes], int]] = OrderedDict()
        self._waiting = 0
        self._lock = threading.Lock()

    def expect(self, pieces: Iterable[tuple[int, int]], gap: int = 0) -> None:
        """Begins to fetch pieces."""
        with self._lock:
            self._left.extend(merged(sorted({p for p in pieces if p not in self._coming and p[0] < p[1]}), gap=gap))
            self._fill()

    def _fill(self) -> None:
        while self._left and self._waiting < self._most:
            pieces = self._left.popleft()
            start, stop = pieces[0][0], pieces[-1][1]
            future = self._pool.submit(self._url.store.read, self._url.key, start, stop)
            self._coming.update((piece, (future, start)) for piece in pieces)
            self._waiting += sum(last - first for first, last in pieces)
        while len(self._coming) > MOST_ANNOUNCED:
            self._take(next(iter(self._coming)))

    def _take(self, piece: tuple[int, int]) -> tuple[Future[bytes], int]:
        self._waiting -= piece[1] - piece[0]
        return self._coming.pop(piece)

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes `start:stop`. Raises StoreError."""
        with self._lock:
            future, begin = self._take((start, stop)) if (start, stop) in self._coming else (None, start)
            self._fill()
        data = self._url.store.read(self._url.key, start, stop) if future is None else future.result()
        return memoryview(data)[start - begin : stop - begin]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
