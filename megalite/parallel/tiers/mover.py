"""Copies between a device and its host: everything that is in two places is moved by a rank's one `Mover`.

                     on a GPU                                on a CPU, where both places are main memory
    to the device    a stream, from page-locked memory       a thread
    to the host      a stream, to page-locked memory         a thread
    on the host      a thread, behind what has arrived       the same

The rules of lifetime, which are kept here and nowhere else:

    ends      Both are dense and of one dtype. Others torch would copy on the host first, without waiting for the
              copy that fills them.
    order     A copy begins behind what the current stream has been given so far, and behind `after`; copies in one
              direction follow one another. So a target may be overwritten, and a source has been written.
    arrival   `Arrival.wait` orders the current stream behind a copy, `Arrival.synchronize` the host. Until one
              of them has returned nobody may read the target, or write or free the source.
    source    The mover itself holds the host's end of a copy until it has ended, and the device's until a stream waits
              for it: from then on the memory goes back in that stream's order.
    memory    New memory on the device belongs to the stream that is current when the copy starts; any other stream that
              waits for it is recorded as its user, so that the allocator gives it to nobody else too early.
    reuse     Page-locked memory is written again only behind `Arrival.synchronize` of the copy that reads it.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.page_locked import host_bytes
from megalite.parallel.tiers.state_file import StateFile

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(Target, source) of each copy."""


class Started(Protocol):
    """A collective in flight."""

    def wait(self) -> Any: ...


@dataclass(eq=False)
class Arrival:
    """Copies that have been started, or work of the host behind them.

    ends: their tensors on the device, of memory of `stream`; held until a stream waits for the copies.
    """

    future: Future[None] | None = None
    event: Any = None
    started: Started | None = None
    ends: Sequence[Tensor] = ()
    stream: Any = None

    def wait(self) -> None:
        """The current stream goes on behind it; on a CPU this thread does. Raises what a thread has raised."""
        if self.event is not None:
            current = torch.cuda.current_stream()
            current.wait_event(self.event)
            for tensor in self.ends if current != self.stream else ():
                tensor.record_stream(current)
            self.ends = ()
        if self.future is not None:
            self.future.result()
        if self.started is not None:
            self.started.wait()

    def synchronize(self) -> None:
        """The host goes on behind it. Raises what a thread has raised."""
        if self.event is not None:
            self.event.synchronize()
        if self.future is not None:
            self.future.result()

    def done(self) -> bool:
        """Whether it is over, without a failure; does not wait."""
        if self.future is not None:
            return self.future.done() and self.future.exception() is None
        return self.event is None or bool(self.event.query())


class Mover:
    """Makes the copies of one rank.

    apart: whether the device has memory of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.apart = device, device.type == "cuda"
        self._flying: deque[tuple[Arrival, Sequence[Tensor]]] = deque()
        self._works: list[Arrival] = []
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = {}

    @cached_property
    def _streams(self) -> tuple[Any, Any]:
        """To the host, to the device."""
        return torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    @cached_property
    def _threads(self) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        """In the place of streams where the device is a CPU."""
        return ThreadPoolExecutor(1, "to-host"), ThreadPoolExecutor(1, "to-device")

    @cached_property
    def _worker(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "on-host")

    def file_in(self, folder: str) -> StateFile:
        """A file there for masters and moments. Raises ConfigError where the folder cannot take one."""
        return StateFile(folder)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros in host memory that copies go to and from, for as long as a run lasts."""
        shape = torch.Size(shape)
        return host_bytes(shape.numel() * dtype.itemsize, pinned=self.apart).view(dtype).view(shape)

    def to_host(self, pairs: Pairs) -> Arrival:
        """Starts target = source for each pair; targets are page-locked."""
        return self.copy(pairs, to_device=False)

    def to_device(
        self, pairs: Pairs, *, after: Arrival | None = None, start: Callable[[], Started] | None = None
    ) -> Arrival:
        """The other way; sources are page-locked.

        start: sends targets to other ranks. It is called on their stream, and what arrives is what it has received.
        """
        return self.copy(pairs, to_device=True, after=after, start=start)

    def land(self, x: Tensor, *, release: bool = False) -> tuple[Tensor, Arrival]:
        """A copy of x in host memory, of which nobody keeps a view longer than itself. release: the caller lets go of x
        now."""
        copy = self._lent(x) if self.apart else torch.empty_like(x, device="cpu")
        arrival = self.to_host([(copy, x)])
        if release and self.apart:
            x.record_stream(self._streams[False])
            arrival.ends = ()
        return copy, arrival

    def _lent(self, x: Tensor) -> Tensor:
        """Page-locked memory like x, at most a page or an eighth too large (torch's allocator doubles). It is lent
        again once the result is gone, which the mover holds as long as a copy needs it."""
        step = max(4096, 1 << max(0, x.nbytes.bit_length() - 4))
        size = -(-max(x.nbytes, 1) // step) * step
        with self._lock:  # the host's work copies, too
            free = self._free.setdefault(size, [])
            block = free.pop() if free else None
        block = host_bytes(size, pinned=True) if block is None else block
        copy = block[: x.nbytes].view(x.dtype).view(x.shape)
        weakref.finalize(copy, free.append, block).atexit = False
        return copy

    def bring(self, x: Tensor, *, after: Arrival | None = None) -> tuple[Tensor, Arrival]:
        """A copy on the device of page-locked x."""
        copy = torch.empty_like(x, device=self.device)
        return copy, self.to_device([(copy, x)], after=after)

    def upload(self, x: Tensor) -> Tensor:
        """Copies what the host has just made to the device, ahead of what the device was given before. On a CPU returns
        x itself."""
        if not self.apart:
            return x
        stream, source = self._streams[True], x if x.is_contiguous() and x.is_pinned() else self._lent(x).copy_(x)
        with torch.cuda.stream(stream):
            copy = torch.empty_like(source, device=self.device)
        arrival = self.copy([(copy, source)], to_device=True, overtakes=True)
        arrival.stream = stream
        arrival.wait()
        return copy

    def download(self, x: Tensor) -> Tensor:
        """Copies to the host, which waits. Nobody keeps a view of the result longer than itself. On a CPU returns x."""
        if not self.apart:
            return x
        copy = self._lent(x)
        self.to_host([(copy, x)]).synchronize()
        return copy

    def copy(
        self,
        pairs: Pairs,
        *,
        to_device: bool,
        after: Arrival | None = None,
        start: Callable[[], Started] | None = None,
        overtakes: bool = False,
    ) -> Arrival:
        """Every copy between the places. overtakes: it begins ahead of what the current stream has been given."""
        for target, source in pairs:
            assert target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype, "ends of a copy"
        if not self.apart:
            arrival = Arrival(self._threads[to_device].submit(self._copy_behind, pairs, after))
            self._note(arrival, ())
            if start is None:
                return arrival
            arrival.synchronize()
            return Arrival(started=start())
        stream, current = self._streams[to_device], torch.cuda.current_stream(self.device)
        if not overtakes:
            stream.wait_stream(current)
        if after is not None:
            stream.wait_event(after.event)
        with torch.cuda.stream(stream):
            self.move(pairs)
            started = None if start is None else start()
            event = stream.record_event()
        on_device, on_host = (0, 1) if to_device else (1, 0)
        arrival = Arrival(event=event, started=started, ends=[pair[on_device] for pair in pairs], stream=current)
        self._note(arrival, [pair[on_host] for pair in pairs])
        return arrival

    def _note(self, arrival: Arrival, on_host: Sequence[Tensor]) -> None:
        """Holds what a copy uses; forgets what earlier ones used that have ended."""
        with self._lock:  # the host's work copies, too
            while self._flying and self._flying[0][0].done():
                self._flying.popleft()
            self._flying.append((arrival, on_host))

    def _copy_behind(self, pairs: Pairs, after: Arrival | None) -> None:
        if after is not None:
            after.synchronize()
        self.move(pairs)

    def move(self, pairs: Pairs) -> None:
        """Copies, on the stream or thread that is meant for it. (`benchmarks/tiers.py` makes it slow.)"""
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    def then(self, work: Callable[[], object], *after: Arrival) -> Arrival:
        """Starts work of the host, behind arrivals and earlier work."""

        def run() -> None:
            with torch.cuda.device(self.device) if self.apart else nullcontext():  # a thread has one of its own
                for arrival in after:
                    arrival.synchronize()
                work()

        self._works = [earlier for earlier in self._works if not earlier.done()]
        self._works.append(arrival := Arrival(self._worker.submit(run)))
        return arrival

    def close(self) -> None:
        """Returns when the host's work has ended, whatever became of it."""
        self._worker.shutdown()

    def settle(self) -> None:
        """Returns when nothing is on its way and the host has no work: it may read and write its memory. Raises what
        work has raised."""
        works, self._works = self._works, []
        for arrival in works:
            arrival.synchronize()
        with self._lock:
            flying, self._flying = self._flying, deque()
        for arrival, _ in flying:
            arrival.synchronize()


class TieredMemory:
    """Counts the bytes of objects that are on the device for a while: now, and at most. mover: brings them."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self.now = self.peak = 0

    def count(self, nbytes: int) -> None:
        """Adds the bytes of what has come, or with a minus of what has left."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)
