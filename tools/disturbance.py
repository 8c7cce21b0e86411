"""Who else computes on this machine: what was measured beside a busy neighbour is no measurement.

Linux tells the busy seconds of all cores in /proc/stat and those of each process in /proc/PID/stat; others = all minus
own. Elsewhere nothing is known, and nothing is called disturbed.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from pathlib import Path
from typing import Final


def _ticks() -> int:
    """Of the kernel's clock in a second."""
    return os.sysconf("SC_CLK_TCK")


class BusyClock:
    """Seconds that cores have worked."""

    #: Cores that others may use before a measurement counts as disturbed.
    QUIET: Final = 0.3

    @staticmethod
    def busy_seconds() -> float:
        """Of all cores since the machine started (time stolen by other guests included)."""
        try:
            fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return 0.0
        return (sum(fields) - fields[3] - fields[4]) / _ticks()

    @staticmethod
    def own_seconds() -> float:
        """Of this process and its descendants, those that have ended included."""
        total, waiting = 0.0, [os.getpid()]
        while waiting:
            process = waiting.pop()
            try:
                fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                total += sum(int(field) for field in fields[11:15]) / _ticks()
                for task in Path(f"/proc/{process}/task").iterdir():
                    waiting += [int(child) for child in (task / "children").read_text().split()]
            except (OSError, ValueError, IndexError):
                continue
        return total


class Watch:
    """A thread that notes, `interval` seconds apart, what others use. Use as a context."""

    def __init__(self, interval: float = 0.1) -> None:
        self._interval = interval
        self._times: list[float] = []
        self._others: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.is_set():
            self._note()
            self._end.wait(self._interval)
        self._note()

    def _note(self) -> None:
        self._others.append(BusyClock.busy_seconds() - BusyClock.own_seconds())
        self._times.append(time.time())

    def others(self, begin: float, end: float) -> float:
        """Mean cores that others used between two moments of `time.time()`, from the notes around them."""
        if len(self._times) < 2:
            return 0.0
        first = max(0, bisect_left(self._times, begin) - 1)
        last = min(len(self._times) - 1, bisect_left(self._times, end))
        if last <= first:
            return 0.0
        return max(0.0, (self._others[last] - self._others[first]) / (self._times[last] - self._times[first]))

    def wait_for_quiet(self, seconds: float, patience: float) -> bool:
        """Until others have been quiet for so long; False when patience has ended before."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            now = time.time()
            if self._times and self._times[0] <= now - seconds and self.others(now - seconds, now) < BusyClock.QUIET:
                return True
            time.sleep(self._interval)
        return False
