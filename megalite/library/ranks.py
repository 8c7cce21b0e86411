"""Ranks for a function: the launcher without a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megalite.comm import World
from megalite.config import DeviceOptions, ParallelConfig
from megalite.launch import launch, read_environment


@dataclass(frozen=True)
class LaunchSettings:
    """What the launcher asks of a configuration."""

    parallel: ParallelConfig


def run(
    function: Callable[[World], int | None],
    nprocs: int | None = None,
    *,
    device: str = "auto",
    timeout_minutes: float = 10.0,
) -> int:
    """Runs `function(world)` on every rank and returns the exit status of this process.

    nprocs: ranks to start on this machine, one for each GPU or core; None: one. It does not count under torchrun, srun
        or mpirun, which have started the ranks.
    device: 'auto', 'cpu' or 'cuda'.
    timeout_minutes: how long a rank may wait for another.

    Status 0: done; 2: a MegaliteError other than RuntimeFailure, its lines printed once; otherwise the rank that failed
    first has been named. In a single process exceptions that are no MegaliteError pass through.
    """
    place = read_environment()
    parallel = ParallelConfig(
        nprocs=None if place.launcher else nprocs,
        hardware=DeviceOptions(device=device),
        distributed_timeout_minutes=timeout_minutes,
    )

    def begin(_: LaunchSettings, world: World) -> int | None:
        world.report_phase(getattr(function, "__name__", "your function"))
        return function(world)

    return launch(LaunchSettings(parallel), begin, place)
