"""Who is lost: asked by every rank of an outer launcher once a second, in the store where the ranks have met.

    host a: rank 0 -> rank 1 -> rank 2 -> rank 0     each watches the process of the next one of its host: seen at once
       |                                             (a peer behind shared memory or NCCL breaks no connection)
       |  beat/0, beat/1: one rank a host writes every 3 s; 15 s of silence, and the host is lost
       v
    host b: rank 3 -> rank 4 -> rank 5 -> rank 3     (a pulled link breaks no connection either)

A host watches the one that came after it, so a second of watching costs each rank a request or two, however many there
are. A process that was itself stopped for a while judges nobody by that time. Proof: `tests/faults/test_pulse.py`.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.errors import rank_name
from megalite.launch.environment import LaunchEnvironment

if TYPE_CHECKING:
    import torch.distributed as dist

BEAT_SECONDS = 3.0
SILENCE_SECONDS = 15.0
PAUSE_SECONDS = 5.0  # between two looks at the clock: whoever does not look for so long was stopped himself


class Patience:
    """Measures silence, in seconds during which this process was running."""

    def __init__(self) -> None:
        self.heard()

    def heard(self) -> None:
        """There was a sign of life."""
        self._looked = time.monotonic()
        self._silence = 0.0

    def is_over(self) -> bool:
        """Whether there was none for too long. To be asked every second or so."""
        now = time.monotonic()
        passed = now - self._looked
        self._looked = now
        self._silence += passed if passed < PAUSE_SECONDS else 0.0
        return self._silence > SILENCE_SECONDS


class Pulse:
    """One rank's part of the watch over all of them."""

    def __init__(self, store: dist.Store, place: LaunchEnvironment, host: str) -> None:
        self._store, self._place, self._host = store, place, host
        self._neighbour: tuple[int, int] | None = None  # rank, descriptor of its process
        self._heard, self._last = Patience(), b""
        self._here = f"processes/{_machine()} {os.getppid()}"  # a launcher may run twice on one machine
        store.set(f"{self._here}/{place.local_rank}", f"{place.rank} {os.getpid()}")
        self._number = store.add("beat/hosts", 1) - 1 if place.local_rank == 0 else None
        if self._number is not None:
            self._beat(self._number)

    def lost(self) -> str:
        """Names a rank or a host that is lost; empty where nobody is. To be asked every second or so."""
        if self._neighbour is None:
            self._neighbour = self._find_neighbour()
        if self._neighbour is not None:
            rank, process = self._neighbour
            if process < 0 or wait([process], 0):  # it has ended, be it that nobody has asked how
                return rank_name(rank, self._host)
        if self._number is None or time.monotonic() < self._next_beat:
            return ""
        self._beat(self._number)
        return self._silent_host(self._number)

    def _beat(self, number: int) -> None:
        self._next_beat = time.monotonic() + BEAT_SECONDS
        others = " and the others of its host" if self._place.local_size > 1 else ""
        self._store.set(f"beat/{number}", f"{self._next_beat} {rank_name(self._place.rank, self._host)}{others}")

    def _find_neighbour(self) -> tuple[int, int] | None:
        """The next rank of this host; None until it comes, and where ranks do not see each other's processes."""
        key = f"{self._here}/{(self._place.local_rank + 1) % self._place.local_size}"
        if self._place.local_size == 1 or sys.platform != "linux" or not self._store.check([key]):
            return None
        neighbour, process = map(int, self._store.get(key).split())
        try:
            return neighbour, os.pidfd_open(process)
        except ProcessLookupError:
            return neighbour, -1

    def _silent_host(self, number: int) -> str:
        """The host after this one, if nothing was heard of it for too long."""
        watched = (number + 1) % self._store.add("beat/hosts", 0)
        key = f"beat/{watched}"
        if watched == number or not self._store.check([key]):
            self._heard.heard()
            return ""
        beat = self._store.get(key)
        if beat != self._last:
            self._last = beat
            self._heard.heard()
        return beat.decode().partition(" ")[2] if self._heard.is_over() else ""


def _machine() -> str:
    """Names the set of process numbers that this process is counted in: those of a host, or of a container."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip() if boot.exists() else ''} {os.readlink(space) if space.is_symlink() else ''}"
