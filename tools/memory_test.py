"""The memory test of doctor.py: how fast do the host's memory, its disk and the link to a device move bytes?

The names are those of a hardware file (`megalite/planner/hardware/`): what is printed can be pasted into one, and
`tools/plan.py` then prices optimizer states on the host (`--offload optimizer`) and in a file
(`--offload path`).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

BYTES = 32 * 1024 * 1024
REPEATS = 3


def measure_memory(folder: str) -> dict[str, float]:
    """Bytes per second by name; of disks that of `folder`. Raises OSError where nothing can be written there."""
    import torch

    source = torch.zeros(BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    found = {"host_copy": 2 * BYTES / _fastest(lambda: target.copy_(source))}  # read and written
    found |= _disk(folder)
    if torch.cuda.device_count():
        pinned, there = source.pin_memory(), source.to("cuda")

        def over() -> None:
            there.copy_(pinned, non_blocking=True)
            torch.cuda.synchronize()

        found["host_link"] = BYTES / _fastest(over)
    return found


def _disk(folder: str) -> dict[str, float]:
    """Of a file that is forced to the disk, and read again after the system has forgotten it where it can be told."""
    content = os.urandom(BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="megalite-doctor-") as file:

        def write() -> None:
            os.pwrite(file.fileno(), content, 0)
            os.fsync(file.fileno())

        def forget() -> None:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        return {
            "disk_write": BYTES / _fastest(write),
            "disk_read": BYTES / _fastest(lambda: os.pread(file.fileno(), BYTES, 0), before=forget),
        }


def _fastest(work: Callable[[], object], before: Callable[[], None] = lambda: None) -> float:
    """Seconds of the fastest of a few times, after one that does not count."""
    times = []
    for _ in range(REPEATS + 1):
        before()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def folder_of(given: str | None) -> Path:
    """The folder whose disk is measured: the given one, else that of temporary files."""
    return Path(given or tempfile.gettempdir())
