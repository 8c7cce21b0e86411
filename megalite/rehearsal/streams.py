"""Stand-ins for torch.cuda's streams and events, and what a thread of the host has as its current stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megalite.rehearsal.order import Clock, Ledger, Line
from megalite.rehearsal.record import Calls

DEVICE = torch.device("cuda", 0)


class _Thread(threading.local):
    """Of a thread. current: the stream that it gives work to. quiet: nothing is recorded. true_device: tensors say
    where they really are (inside torch's own kernels). on_its_way: a copy between the places was asked for. capturing:
    the graph that gets its kernels."""

    quiet = true_device = on_its_way = False
    capturing: Any = None

    def __init__(self, current: Stream) -> None:
        self.current = current


class Gpu:
    """A device that is bookkeeping: its streams, and what it has been seen to do. unwaited: handles that nobody has
    waited for. calls: collectives and messages in the order in which the host starts them. place: where its memory
    really is. kernels: what they return (`values.py`)."""

    def __init__(self, place: str = "cpu") -> None:
        self.place = torch.device(place)
        self.ledger = Ledger()
        self.calls = Calls(self.ledger)
        self.kernels: Any = None
        self.compute = Stream(self, "the compute stream")
        self.unwaited: dict[int, Any] = {}
        self.local = _Thread(self.compute)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["local"], name)

    @property
    def races(self) -> list[str]:
        """Pairs of accesses that nothing orders: what, both lines of the source, both streams."""
        return list(self.ledger.races.values())

    @contextmanager
    def state(self, **values: Any) -> Iterator[None]:
        """Sets what there is of this thread for a while."""
        before = dict(vars(self.local))
        vars(self.local).update(values)
        try:
            yield
        finally:
            vars(self.local).clear()
            vars(self.local).update(before)

    def on_device(self, x: torch.Tensor) -> bool:
        return self.ledger.on_device(x.untyped_storage()._cdata)

    def host_waits(self) -> None:
        """For all that any stream has been given."""
        clock = Clock()
        for line in list(self.ledger.lines):
            clock |= {number: max(time, clock.get(number, 0)) for number, time in line.clock.items()}
        self.host_knows(clock, "synchronize()")

    def host_knows(self, clock: Clock, why: str) -> None:
        """The host has waited for all of this."""
        if self.local.capturing is not None:
            raise RuntimeError(f"{why}: the host waits for the device while a graph is captured")
        self.ledger.host.learn(clock)
        self.kernels.settle(clock)
        self.ledger.synced(why)


class Stream:
    """In place of `torch.cuda.Stream`."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu = gpu
        self.line: Line = gpu.ledger.line(name)
        self.device = DEVICE

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self._gpu) if event is None else event
        event.clock = dict(self.line.clock)
        return event

    def wait_event(self, event: Event) -> None:
        self.line.learn(event.clock)
        self._gpu.kernels.waited(self.line)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self, why: str = "synchronize() of a stream") -> None:
        self._gpu.host_knows(self.line.clock, why)

    def query(self) -> bool:
        """Whether all its work is over: never, as long as nobody has waited."""
        return False


class Event:
    """In place of `torch.cuda.Event`. One that was not recorded is over."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        (stream or self._gpu.current).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._gpu.current).wait_event(self)

    def synchronize(self) -> None:
        self._gpu.host_knows(self.clock, "synchronize() of an event")

    def query(self) -> bool:
        """Whether it is over: not before somebody has waited."""
        host = self._gpu.ledger.host.clock
        return all(host.get(number, 0) >= time for number, time in self.clock.items())

    def elapsed_time(self, other: Event) -> float:
        return 0.0
