"""Checkpoints: saving, loading and asynchronous saving, beside torch.distributed.checkpoint.

    python benchmarks/checkpoint.py [--dir DIR]                   # two processes, 420 MB
    python benchmarks/checkpoint.py --quick --check               # compared with baseline.json

Each rank holds its rows of each of 40 fp32 matrices. Both sides write every file through to the disk; megalite
writes and verifies checksums too. Both load into tensors that were zeroed just before. `wait`: how long an asynchronous
save keeps the caller; the save itself ends outside of the time.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks.harness import Benchmark, Flag
from benchmarks.turns import Case, Place, Variant, folder_of

if TYPE_CHECKING:
    from torch import Tensor

TENSORS, COLUMNS = 40, 1024
WHAT = ("save", "load", "wait")
VARIANTS = ("megalite", "torch")
FLAGS = {
    "megabytes": Flag("of state over all ranks", 419, 100),
    "ranks": Flag("processes", 2, 2),
    "dir": Flag("folder on the disk that is measured, unset: temporary files", "", ""),
}


def cases(args: argparse.Namespace) -> list[Case]:
    rows = max(1, int(args.megabytes * 1e6 / 4 / TENSORS / COLUMNS / args.ranks)) * args.ranks
    settings = {"rows": rows, "dir": args.dir}
    megabytes = rows * COLUMNS * 4 * TENSORS / 1e6
    size = f"{megabytes:.0f} MB, {args.ranks} ranks"
    pairs = (("megalite", "torch"),)
    return [
        Case(f"{what}, {size}", VARIANTS, pairs, {**settings, "what": what}, megabytes, "MB", ranks=args.ranks)
        for what in WHAT
    ]


def build(name: str, case: Case, place: Place) -> Variant:
    import torch

    rows, what = case.settings["rows"], case.settings["what"]
    own = rows // place.ranks
    state = {f"w{number}": torch.randn(own, COLUMNS) for number in range(TENSORS)}
    folder = folder_of(place, name, case.settings["dir"])
    sides = {"megalite": megalite_side, "torch": torch_side}
    return sides[name](what, state, rows, folder, place)


def emptied(folder: Path, place: Place) -> Callable[[], None]:
    """So that each save begins in an empty folder, after the one before has ended everywhere."""

    def empty() -> None:
        place.synchronize()
        if place.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        place.synchronize()

    return empty


def zeroed(state: dict[str, Tensor]) -> Callable[[], None]:
    def zero() -> None:
        for tensor in state.values():
            tensor.zero_()

    return zero


def megalite_side(what: str, state: dict[str, Tensor], rows: int, folder: Path, place: Place) -> Variant:
    from megalite.checkpoint import Checkpointer
    from megalite.comm import ParallelMesh, TensorShard

    world = ParallelMesh.build(rank=place.rank, size=place.ranks).world
    first = rows // place.ranks * place.rank
    shards = [TensorShard(name, (rows, COLUMNS), (first, 0), tensor) for name, tensor in state.items()]
    saver, empty = Checkpointer(folder, world=world), emptied(folder, place)
    numbers = iter(range(1, 10**6))
    if what == "save":
        return Variant(lambda: saver.save(next(numbers), shards, {}), before=empty)
    if what == "load":
        empty()
        path = saver.save(1, shards, {})
        return Variant(lambda: saver.load(path, shards), before=zeroed(state))

    def prepare() -> None:
        saver.wait()
        empty()

    return Variant(lambda: saver.save(next(numbers), shards, {}, background=True), before=prepare)


def torch_side(what: str, state: dict[str, Tensor], rows: int, folder: Path, place: Place) -> Variant:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (place.ranks,))
    shards = {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}
    empty, where = emptied(folder, place), str(folder)
    if what == "save":
        return Variant(lambda: dcp.save(shards, checkpoint_id=where), before=empty)
    if what == "load":
        empty()
        dcp.save(shards, checkpoint_id=where)
        return Variant(lambda: dcp.load(shards, checkpoint_id=where), before=zeroed(state))
    group = dist.new_group(backend="gloo")  # its thread must not meet our own collectives in the default group
    running: list[Any] = []

    def prepare() -> None:
        while running:
            running.pop().result()
        empty()

    def save() -> None:
        running.append(dcp.async_save(shards, checkpoint_id=where, process_group=group))

    return Variant(save, before=prepare)


BENCHMARK = Benchmark("checkpoint", __doc__, FLAGS, cases, build, VARIANTS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
