"""The faults of the running test case. `megalite.faults.fault_point` finds this module once it is loaded.

Only ranks that the harness forked load it; the state below is the process's own and dies with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch.distributed as dist


class Listener(Protocol):
    """A `Fault`, or an object that only watches."""

    def reached(self, name: str, facts: Mapping[str, object]) -> None: ...


FAULTS: list[Listener] = []


def install(faults: Iterable[Listener]) -> None:
    """Makes these the faults of this process."""
    FAULTS[:] = faults


def reach(name: str, facts: Mapping[str, object]) -> None:
    """Called at every fault point. A point that does not name its rank gets this process's."""
    if not FAULTS:
        return
    rank = dist.get_rank() if dist.is_initialized() else 0
    for fault in FAULTS:
        fault.reached(name, {"rank": rank, **facts})
