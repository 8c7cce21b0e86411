"""The collective test of doctor.py: do two ranks of this machine reach each other, give the right sums, and how fast?

Bus bandwidth of an all-reduce of n bytes over r ranks is 2 (r - 1) / r * n / time (the bytes each rank must send in
the best algorithm), so that the number compares with the hardware's.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.errors import RuntimeFailure
from megalite.launch import RankPage, supervise

if TYPE_CHECKING:
    import torch

SIZES = (4 * 1024, 1024 * 1024, 32 * 1024 * 1024)
REPEATS = 7


@dataclass(frozen=True)
class Measurement:
    """Median time of one operation on `num_bytes` per rank; bandwidth in bytes per second."""

    operation: str
    num_bytes: int
    seconds: float
    bandwidth: float


def measure_collectives(size: int = 2, *, device: str = "cpu", timeout: float = 60.0) -> list[Measurement]:
    """Forks `size` ranks and times all-reduce and send/receive between them, after checking a sum.

    Must be called before this process has computed anything (see `supervise`). device: "cpu" (gloo) or "cuda" (NCCL,
    one GPU per rank). Raises RuntimeFailure that names the rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix="megalite-") as folder:

        def body(rank: int, page: RankPage) -> None:
            _measure(rank, size, device, Path(folder), page.set_phase, timeout)

        outcome = supervise(size, body, hang_seconds=timeout, deadline_seconds=timeout)
        if outcome.culprit is not None:
            raise RuntimeFailure(f"local collective test on {device}: {outcome.describe()}")
        records = json.loads((Path(folder) / "result.json").read_text())
    return [Measurement(**record) for record in records]


def _measure(rank: int, size: int, device: str, folder: Path, set_phase: Callable[[str], None], timeout: float) -> None:
    """The test as one rank lives it; rank 0 leaves the result in the folder."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    set_phase("forming the process group")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
        store=dist.FileStore(str(folder / "rendezvous"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    set_phase("all-reduce")
    value = torch.full((1000,), rank + 1.0, device=place)
    dist.all_reduce(value)
    expected = size * (size + 1) / 2
    if not bool((value == expected).all()):
        raise RuntimeFailure(f"all-reduce gave {value[0].item():g} instead of {expected:g}")

    records = []
    for num_bytes in SIZES:
        buffer = torch.ones(num_bytes // 4, device=place)
        seconds = _median_seconds(functools.partial(dist.all_reduce, buffer, op=dist.ReduceOp.MAX), place)
        bandwidth = 2 * (size - 1) / size * num_bytes / seconds
        records.append(vars(Measurement(f"all-reduce, {size} ranks", num_bytes, seconds, bandwidth)))
    set_phase("send and receive")
    for num_bytes in SIZES:
        buffer = torch.ones(num_bytes // 4, device=place)
        # There and back: half of it is one message.
        seconds = _median_seconds(functools.partial(_there_and_back, buffer, rank), place) / 2
        records.append(vars(Measurement("send/receive", num_bytes, seconds, num_bytes / seconds)))
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(records))


def _median_seconds(action: Callable[[], object], device: torch.device) -> float:
    """Median time of an action, after a first one that is not counted."""
    import torch

    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _there_and_back(buffer: torch.Tensor, rank: int) -> None:
    """Ranks 0 and 1 pass the buffer to each other once; the others rest."""
    import torch.distributed as dist

    if rank == 0:
        dist.send(buffer, 1)
        dist.recv(buffer, 1)
    elif rank == 1:
        dist.recv(buffer, 0)
        dist.send(buffer, 0)
