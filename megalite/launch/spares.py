"""Ranks that were started and have no place in the layout (`--elastic`): they wait until the ranks are dealt out anew.

    started   0 1 2 | 3 4 5      two hosts of three ranks, tp 2
    train     0 1   | 2 3        pairs stay on a host
    spares        + |     +      hold a connection to the store: told when the run is done, or has failed

A launcher that restarts ranks (torchrun) ends spares with the others, and numbers all of them anew.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from megalite.errors import ConfigError
from megalite.launch.environment import LaunchEnvironment
from megalite.launch.meeting import open_store
from megalite.launch.watch import OVER

if TYPE_CHECKING:
    import torch.distributed as dist

DONE, LEFT = "spares/done", "spares/left"
ASK_SECONDS = 0.5
FAREWELL_SECONDS = 5.0


def take_seat(place: LaunchEnvironment, ranks: int, together: int) -> LaunchEnvironment | None:
    """The place of this process among the `ranks` that train; None for a spare. together: neighbours that stay on one
    host, if a host has room for them. Raises ConfigError where the launcher does not number ranks host by host."""
    if ranks == place.size:
        return place
    if place.size % place.local_size or (place.rank - place.local_rank) % place.local_size:
        raise ConfigError(
            f"`elastic`: rank {place.rank} is number {place.local_rank} of {place.local_size} on its host; start as "
            "many ranks on every host, numbered host by host"
        )
    per_host = place.local_size // together * together or place.local_size
    first = place.rank // place.local_size * per_host
    here = min(per_host, ranks - first)
    if place.local_rank >= here:
        return None
    return replace(place, rank=first + place.local_rank, size=ranks, local_size=here)


def wait_as_spare(place: LaunchEnvironment, host: str, seconds: float) -> int:
    """Waits until the ranks that train have left; the exit status: 0 if the run is done. Signals that ask the run to
    save are not for this rank; one that ends it does so at once."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: os._exit(0))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(place.started_by or os.getppid(),), daemon=True).start()
    try:
        store = open_store(place, host, seconds)
        while not store.check([DONE]):
            if store.check([OVER]):
                return 1
            time.sleep(ASK_SECONDS)
        store.add(LEFT, 1)
    except Exception:  # rank 0, which serves the store, has gone without a word
        return 1
    return 0


def _end_with(launcher: int) -> None:
    """Ends this process when its launcher is gone; also while it looks for a store that has gone with it."""
    while os.getppid() == launcher:
        time.sleep(ASK_SECONDS)
    os._exit(1)


def release_spares(store: dist.Store, count: int) -> None:
    """The run is done: tells the spares, and stays until they have heard it."""
    store.set(DONE, "")
    deadline = time.monotonic() + FAREWELL_SECONDS
    while store.add(LEFT, 0) < count and time.monotonic() < deadline:
        time.sleep(0.02)
