"""Rank, world size, device and host of this process, and how it reports what it is doing."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class World:
    """This process's place in the run. A world of one rank has no process group.

    rank, size: number of this process, and how many there are.
    local_rank, local_size: the same within this host.
    device: where this rank computes.
    host: name of this machine, for messages. launch: of the launch, if its ranks are restarted after a failure.
    report_phase: records what this rank is doing ("iteration 7: forward"), which is shown if it dies or stops
    answering; a call costs about a microsecond and sends nothing.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    local_rank: int = 0
    local_size: int = 1
    host: str = "localhost"
    launch: str = field(default="", compare=False)
    report_phase: Callable[[str], None] = field(default=lambda phase: None, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        """True on the rank that prints."""
        return self.rank == 0
