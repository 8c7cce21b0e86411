"""A clock for the time that a GPU stands still for messages.

NCCL blocks a stream and not the host, so a clock on the host sees nothing. Here an event is recorded on the computing
stream before each wait and one behind it; in between is the wait alone. Nobody waits for the events either: those that
the device has passed are read once an iteration, so a wait is counted an iteration or so later.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megalite.comm.axis import WaitClock


class DeviceWaitClock(WaitClock):
    """`WaitClock` of a GPU. Waits on other streams than the one that was current at first are not counted: whoever uses
    those computes meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._computing: Any = torch.cuda.current_stream()
        self._begun: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()
        self._free: list[Any] = []

    def __enter__(self) -> None:
        self._begun = self._recorded() if torch.cuda.current_stream() == self._computing else None

    def __exit__(self, *_: object) -> None:
        if self._begun is not None:
            self._pending.append((self._begun, self._recorded()))
            self._begun = None

    def take(self) -> float:
        """The seconds of waits that the device has behind it and that were not counted before."""
        milliseconds = 0.0
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            milliseconds += begin.elapsed_time(end)
            self._free += [begin, end]
        return milliseconds / 1e3

    def _recorded(self) -> Any:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def message_stream() -> Any:
    """A stream of the current GPU in which one message follows another while the computing stream goes on."""
    return torch.cuda.Stream()


@contextmanager
def following(stream: Any) -> Iterator[None]:
    """What is started inside goes into this stream, after what the current one has been given."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
