"""Who uses memory when, and what is known to be over by then: vector clocks (Lamport, 1978; Fidge, 1988).

    line      a stream of the device, or a thread of the host: its work runs in order
    clock     of a line: how much of every line's work is over when its next piece of work begins
    access    a piece of work reads or writes a region of a memory

Two accesses of which one writes race where neither line's clock has the other: nothing orders them.

Memory of the device that is freed goes back to the pool of the stream that it was allocated on, whose next allocation
may be the same memory, while another stream still uses it. Here every allocation is taken to be all the memory that its
pool has: it begins with the last access of every line to anything that was freed there.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, count
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

FRAMES = 4
"""Calls of the product that a place names, innermost first."""
EXACT = 1 << 16
"""Elements up to which two strided regions are compared element by element."""

Clock = dict[int, int]
Event = tuple[str, int, int, int, str]
"""(alloc, number of the memory, bytes, line, place), (free, number of the memory, 0, 0, ''), (sync, 0, 0, 0, why and
place), (call, number of the call, 0, 0, ''), (action, 0, 0, 0, its text); with prices (behind, time, 0, line, '') and
then (work, time, nanoseconds, line, kind and kernel and place)."""


@cache
def shown(file: str) -> str:
    """How a place names a file of the product or of its users; empty for those of Python, of packages, of this room."""
    path, here = Path(file), Path(__file__).resolve().parent
    others = "site-packages" in path.parts or Path(sysconfig.get_path("stdlib")) in path.parents or path.suffix != ".py"
    if here in path.parents or (others and here.parent not in path.parents):
        return ""
    return f"{path.parent.name}/{path.name}"


def where() -> str:
    """The product's lines that are being executed: `zero/unshard.py:45 start_gather < ...`."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < FRAMES:
        code = frame.f_code
        if name := shown(code.co_filename):
            lines.append(f"{name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(lines)


class Line:
    """A stream of the device or a thread of the host. learned: since its latest work."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.clock: Clock = {}
        self.learned: Clock = {}

    def tick(self) -> int:
        """Begins the next piece of work; returns its time."""
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def knows(self, access: Access) -> bool:
        return self.clock.get(access.line.number, 0) >= access.time

    def learn(self, clock: Clock) -> None:
        """What comes next begins when all of that is over."""
        for number, time in clock.items():
            if self.clock.get(number, 0) < time:
                self.clock[number] = self.learned[number] = time


class Region(NamedTuple):
    """Elements of a storage, in bytes. shape, strides: where they do not fill a stretch of memory."""

    begin: int
    end: int
    dense: bool = True
    width: int = 1
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @classmethod
    def of(cls, x: Tensor) -> Region:
        width = x.element_size()
        begin = int(x.storage_offset()) * width
        if x.is_contiguous():
            return cls(begin, begin + x.numel() * width)
        end = begin + width * (1 + sum((n - 1) * int(s) for n, s in zip(x.shape, x.stride(), strict=True)))
        return cls(begin, end, is_dense(x), width, tuple(x.shape), x.stride())

    def meets(self, other: Region) -> bool:
        """Whether they share a byte."""
        if self.end <= other.begin or other.end <= self.begin:
            return False
        if self.dense and other.dense:
            return True
        if max(self.end - self.begin, other.end - other.begin) > EXACT * max(self.width, other.width):
            return True
        return not self._bytes().isdisjoint(other._bytes())

    def _bytes(self) -> set[int]:
        if self.dense:
            return set(range(self.begin, self.end))
        starts = [self.begin]
        for n, stride in zip(self.shape, self.strides, strict=True):
            starts = [start + i * stride * self.width for start in starts for i in range(n)]
        return {start + i for start in starts for i in range(self.width)}


EVERYTHING = Region(0, sys.maxsize)


def is_dense(x: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order."""
    if x.is_contiguous():
        return True
    reach = 1
    for stride, n in sorted((stride, n) for stride, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride != reach:
            return False
        reach *= n
    return True


class Access(NamedTuple):
    """freed: where its memory was freed, of an access to what the memory was before."""

    line: Line
    time: int
    writes: bool
    region: Region
    op: str
    place: str
    freed: str | None = None

    def __str__(self) -> str:
        return f"{self.op} on {self.line.name} at {self.place}"


@dataclass
class Memory:
    """A storage. line: the stream whose pool it comes from; None: on the host. registered: page-locked in place, so
    that its owner, not torch, sees to it that no copy still uses it when it goes. recorded: numbers of the lines that
    the allocator knows to use it. latest: of each line that has used it, the time. known: its bytes, where it is
    without memory and somebody knows them. goes: tells that its storage has gone."""

    line: Line | None
    pinned: bool
    nbytes: int
    number: int = 0
    registered: bool = False
    known: Tensor | None = None
    seen: list[Access] = field(default_factory=list)
    latest: Clock = field(default_factory=Clock)
    recorded: set[int] = field(default_factory=set)
    goes: object = None

    @property
    def on_device(self) -> bool:
        return self.line is not None


class Ledger:
    """All lines, all memory, and the races that were found.

    allocated, peak: bytes on the device, now and at most. locked: addresses of memory that was page-locked in place.
    races: each pair of source lines once. log: what happens, in the host's order (`record.py`). prices: what work takes
    (`timing.py`).
    """

    def __init__(self) -> None:
        self._numbers, self.lock = count(), threading.RLock()
        self._memories = count(1)
        self.log: list[Event] = []
        self.launches = 0
        self.prices: Any = None
        self._memory: dict[int, Memory] = {}
        self._pools: dict[int, dict[int, Access]] = {}
        self._local = threading.local()
        self.lines: list[Line] = []
        self.locked: set[int] = set()
        self.races: dict[tuple[str, str, str], str] = {}
        self.allocated = self.peak = 0

    def line(self, name: str) -> Line:
        """A new line."""
        with self.lock:
            self.lines.append(Line(name, next(self._numbers)))
            return self.lines[-1]

    @property
    def host(self) -> Line:
        """The line of this thread."""
        try:
            found: Line = self._local.host
        except AttributeError:
            thread = threading.current_thread()
            main = thread is threading.main_thread()
            found = self._local.host = self.line("the host" if main else f"the host's thread {thread.name}")
        return found

    # ---- memory ------------------------------------------------------------------------------------------------------

    def of(self, x: Tensor) -> Memory:
        """Its memory; what nobody has announced is on the host."""
        storage = x.untyped_storage()
        memory = self._memory.get(storage._cdata) or self.enter(storage, None)
        if memory.line is None and not memory.pinned and storage.data_ptr() in self.locked:
            memory.pinned = memory.registered = True
        return memory

    def find(self, storage: torch.UntypedStorage) -> Memory | None:
        return self._memory.get(storage._cdata)

    def on_device(self, key: int) -> bool:
        """Of the storage at that address."""
        memory = self._memory.get(key)
        return memory is not None and memory.line is not None

    def enter(self, storage: torch.UntypedStorage, line: Line | None, pinned: bool = False, place: str = "") -> Memory:
        """New memory, of the pool of `line` (None: on the host). place: where, if somebody knows."""
        key = storage._cdata
        with self.lock:
            memory = self._memory[key] = Memory(line, pinned, storage.nbytes(), next(self._memories))
            self._allocated(memory, place)
        memory.goes = weakref.ref(storage, lambda _: self._gone(key, memory))
        return memory

    def _gone(self, key: int, memory: Memory) -> None:
        with self.lock:
            self.free(memory)
            if self._memory.get(key) is memory:
                del self._memory[key]

    def free(self, memory: Memory) -> None:
        """It goes back to its pool. Torch's own page-locked memory goes back when its copies have ended."""
        host = self.host
        pending = [access for access in memory.seen if not host.knows(access)]
        memory.seen, memory.latest = [], {}
        if memory.line is None:
            used = [access for access in pending if memory.registered]
            for access in used[:1]:
                now = Access(host, 0, True, EVERYTHING, "freeing host memory", where())
                self.note("FREED IN USE", access, now)
            return
        self.allocated -= memory.nbytes
        if memory.nbytes:
            self.log.append(("free", memory.number, 0, 0, ""))
        memory.nbytes = 0
        pool, gone = self._pools.setdefault(memory.line.number, {}), ""
        latest = {access.line.number: access for access in pending}
        for number, access in latest.items():
            if number not in memory.recorded and (number not in pool or pool[number].time <= access.time):
                gone = gone or where()
                pool[number] = Access(*access[:2], True, EVERYTHING, *access[4:6], access.freed or gone)
        memory.recorded.clear()

    def resized(self, memory: Memory, line: Line, nbytes: int) -> None:
        """Its bytes go, and where there are new ones they come from the pool of `line`."""
        with self.lock:
            self.free(memory)
            if nbytes:
                memory.line, memory.nbytes = line if memory.on_device else None, nbytes
                self._allocated(memory)

    def _allocated(self, memory: Memory, place: str = "") -> None:
        if memory.line is None:
            return
        self.allocated += memory.nbytes
        self.peak = max(self.peak, self.allocated)
        if memory.nbytes:
            self.log.append(("alloc", memory.number, memory.nbytes, memory.line.number, place or where()))
        pool = self._pools.get(memory.line.number, {})
        host = self.host
        memory.seen = [access for access in pool.values() if not host.knows(access)]
        memory.latest = {access.line.number: access.time for access in memory.seen}

    # ---- work --------------------------------------------------------------------------------------------------------

    def work(
        self, line: Line, op: str, reads: Sequence[Tensor], writes: Sequence[Tensor],
        cost: tuple[float, str] = (0.0, ""), place: str = "",
    ) -> None:  # fmt: skip
        """A piece of work of a line: of a stream, one that this thread launches. cost: as `Prices.kernel` says. place:
        as of `enter`."""
        with self.lock:
            self.launches += 1
            line.learn(self.host.clock)
            time, place = line.tick(), place or where()
            if self.prices is not None and line is not self.host:
                ends = [*reads, *writes]
                away = not all(self.of(x).on_device for x in ends)
                nbytes = sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in ends)
                moved = self.prices.moved(nbytes, over_link=away), "copies" if away else "kernels"
                seconds, kind = cost if cost[1] else moved
                self.log += [("behind", known, 0, other, "") for other, known in line.learned.items()]
                self.log.append(("work", time, int(seconds * 1e9), line.number, sys.intern(f"{kind} {op} at {place}")))
            line.learned.clear()
            for x in reads:
                self._access(x, Access(line, time, False, Region.of(x), op, place))
            for x in writes:
                self._access(x, Access(line, time, True, Region.of(x), op, place))

    def _access(self, x: Tensor, new: Access) -> None:
        if x.numel() == 0:
            return
        memory, clock, region, writes = self.of(x), new.line.clock, new.region, new.writes
        begin, end, dense = region.begin, region.end, region.dense
        for number, time in memory.latest.items():
            if clock.get(number, 0) < time:
                break
        else:  # all is over that anybody does to it; without calls: it is the innermost loop of a rehearsal
            memory.seen = [
                old for old in memory.seen
                if old.region.end > end or old.region.begin < begin
                or (old.writes and not writes) or not (dense or region == old.region)
            ]  # fmt: skip
            memory.seen.append(new)
            memory.latest[new.line.number] = new.time
            return
        kept = []
        for old in memory.seen:
            if clock.get(old.line.number, 0) < old.time:
                if (writes or old.writes) and region.meets(old.region):
                    self.note(_kind(old, new), old, new)
            elif writes or not old.writes:
                other = old.region
                if begin <= other.begin and other.end <= end and (dense or region == other):
                    continue
            kept.append(old)
        kept.append(new)
        memory.seen, memory.latest[new.line.number] = kept, new.time

    def together(self, accesses: Sequence[tuple[Tensor, Access]]) -> None:
        """Of one piece of work, which are in no order."""
        for (x, one), (y, other) in combinations(accesses, 2):
            if (one.writes or other.writes) and self.of(x) is self.of(y) and one.region.meets(other.region):
                self.note(_kind(one, other), one, other)

    def note(self, kind: str, first: Access, second: Access) -> None:
        """A race: the second runs while the first may still run, or before it has begun."""
        freed = "" if first.freed is None else f"\n    (that memory was freed at {first.freed})"
        text = f"{kind}: {second}\n    does not wait for {first}{freed}"
        self.races.setdefault((kind, first.place, second.place), text)

    def synced(self, why: str) -> None:
        """The host has waited for the device."""
        self.log.append(("sync", 0, 0, 0, f"{why} at {where()}"))


def _kind(old: Access, new: Access) -> str:
    if old.freed is not None:
        return "FREED IN USE"
    if not new.writes:
        return "READ BEFORE WRITTEN"
    return "TWO WRITERS" if old.writes else "OVERWRITTEN WHILE READ"


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors in nested arguments."""
    if isinstance(values, Tensor):
        return [values]
    found: list[Tensor] = []
    for value in values.values() if isinstance(values, dict) else values if isinstance(values, (tuple, list)) else ():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            found += tensors_in(value)
    return found
