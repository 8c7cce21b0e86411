"""One test case: what pytest asks of the zygote, and the life of one rank in it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Case:
    """A function, by name, and how to run it on `size` ranks; several form a process group.

    module, qualname: the function is imported in the rank, with `path` as sys.path. arguments: see `wire`.
    folder: results and output go there. peer_timeout: seconds that a collective waits.
    """

    module: str
    qualname: str
    path: tuple[str, ...]
    arguments: bytes
    size: int
    device: str
    folder: Path
    env: dict[str, str | None]
    faults: tuple[str, ...]
    timeout: float
    peer_timeout: float


def rank_body(case: Case, rank: int, set_phase: Callable[[str], None]) -> int:
    """Runs the case's function as `rank`; its result is left in the case's folder."""
    output = os.open(case.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for key, value in case.env.items():
        os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)
    sys.path[:] = case.path

    from megalite.comm import World
    from megalite.testing import fault, wire

    fault.install([fault.Fault.parse(text) for text in case.faults])
    function: object = importlib.import_module(case.module)
    for name in case.qualname.split("."):
        function = getattr(function, name)
    assert callable(function), f"{case.module}.{case.qualname} is not a function"
    arguments = wire.decode(case.arguments)
    assert isinstance(arguments, dict)
    device = _join(case, rank)
    world = World(
        rank=rank, size=case.size, device=device, local_rank=rank, local_size=case.size, report_phase=set_phase
    )
    result = function(world, *arguments["args"], **arguments["kwargs"])
    (case.folder / f"rank{rank}.result").write_bytes(wire.encode(result))
    return 0


def _join(case: Case, rank: int) -> torch.device:
    """Chooses the rank's device and forms the process group over a file of the case's folder."""
    import torch
    import torch.distributed as dist

    device, backend = torch.device("cpu"), "gloo"
    if case.device == "cuda":
        devices = torch.cuda.device_count()
        device = torch.device("cuda", rank % devices)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if devices >= case.size else "gloo"
    if case.size > 1:
        store = dist.FileStore(str(case.folder / "rendezvous"), case.size)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=case.size, timeout=timedelta(seconds=case.peer_timeout)
        )
    return device
