"""`Fault`: what a test wants to happen at a fault point; and those of this process, which `faults.fault_point` asks.

Only the harness installs faults, in the ranks that it forks; they are the process's own and die with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist


def _hold_interpreter() -> None:
    """Waits in C without giving up the interpreter lock: no Python thread of this process runs any more.

    For a mutex that it holds itself: a sleep would end with the signal that asks for the stacks.
    """
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _fail() -> None:
    raise ValueError("injected fault")


ACTIONS: Mapping[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "raise": _fail,
    "sleep": lambda: time.sleep(3600),
    "pause": lambda: time.sleep(1.0),
    "hold-gil": _hold_interpreter,
}


@dataclass
class Fault:
    """`action` happens at the `after`-th time (from 1) that a rank reaches `point` with all facts of `where` equal.

    Facts are compared as text. The text form is `action@point:key=value:key=value`, e.g. `kill@save.begin:rank=1`.
    """

    action: str
    point: str
    where: dict[str, object] = field(default_factory=dict)
    after: int = 1

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"unknown fault action '{self.action}'; choose from {', '.join(ACTIONS)}")

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Reads the text form; `after=N` is not a fact but the count."""
        action, _, rest = text.partition("@")
        point, *facts = rest.split(":")
        where: dict[str, object] = {key: value for key, value in (fact.split("=", 1) for fact in facts)}
        return cls(action, point, where, after=int(str(where.pop("after", 1))))

    @property
    def text(self) -> str:
        """The text form, see `parse`."""
        facts = {**self.where, "after": self.after}
        return f"{self.action}@{self.point}" + "".join(f":{key}={value}" for key, value in facts.items())

    def reached(self, name: str, facts: Mapping[str, object]) -> None:
        """Acts, if this is the instant that was asked for."""
        if name != self.point or any(str(facts.get(key)) != str(value) for key, value in self.where.items()):
            return
        self.after -= 1
        if self.after == 0:
            ACTIONS[self.action]()


class Listener(Protocol):
    """A `Fault`, or an object that only watches."""

    def reached(self, name: str, facts: Mapping[str, object]) -> None: ...


FAULTS: list[Listener] = []


def install(faults: Iterable[Listener]) -> None:
    """Makes these the faults of this process."""
    FAULTS[:] = faults


def reach(name: str, facts: Mapping[str, object]) -> None:
    """Called at every fault point. A point that does not name its rank gets this process's."""
    if FAULTS:
        rank = dist.get_rank() if dist.is_initialized() else 0
        for fault in FAULTS:
            fault.reached(name, {"rank": rank, **facts})
