"""The faults of the running test case. `megalite.faults.fault_point` finds this module once it is loaded.

Only ranks that the harness forked load it; the state below is the process's own and dies with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megalite.testing.fault import Fault

__all__ = ["install", "reach"]

FAULTS: list[Fault] = []


def install(faults: Iterable[Fault]) -> None:
    """Makes these the faults of this process."""
    FAULTS[:] = faults


def reach(name: str, facts: Mapping[str, object]) -> None:
    """Called at every fault point."""
    for fault in FAULTS:
        fault.reached(name, facts)
