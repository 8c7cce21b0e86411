"""megalite's checkpoints beside torch's distributed checkpoint: the same work, round by round, in one run.

Every rank holds half of each of 40 fp32 tensors, as in the peer benchmark's b_ckpt. Checksums and fsync are on. Both
sides load into tensors that were zeroed just before.
`ratio` is torch's time over ours, paired by round: above 1 we are faster. `blocked` is how long an asynchronous save
keeps the caller.

    PYTHONPATH=<bench folder> python tools/bench_adapter_ckpt.py [--procs 2] [--mb 400] [--rounds 7] [--dir DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

import common as lab  # type: ignore[import-not-found]  # of the bench folder
import torch
from torch import Tensor

from megalite.checkpoint import Checkpointer
from megalite.comm import Axis, ParallelMesh, TensorShard, agree_max, barrier

NUM_TENSORS, COLUMNS = 40, 1024
PAIRS = {"save": "dcp-save", "load": "dcp-load", "async-blocked": "dcp-async-blocked"}


class Rank:
    """One rank of the measurement: the state, and the times of each variant."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        rank, size = lab.init_rank()
        self.world: Axis = ParallelMesh.build(rank=rank, size=size).world
        self.directory = Path(arguments.dir)
        rows = arguments.mb * 2**20 // 4 // NUM_TENSORS // COLUMNS // size * size
        mesh = init_device_mesh("cpu", (size,))
        self.state = {
            f"w{i}": distribute_tensor(torch.randn(rows, COLUMNS), mesh, [Shard(0)]) for i in range(NUM_TENSORS)
        }
        self.local: dict[str, Tensor] = {name: value.to_local() for name, value in self.state.items()}
        self.rows, self.nbytes = rows, rows * COLUMNS * 4 * NUM_TENSORS
        self.times: dict[str, list[float]] = {}

    def shards(self, values: dict[str, Tensor]) -> list[TensorShard]:
        first = self.rows // self.world.size * self.world.rank
        return [TensorShard(name, (self.rows, COLUMNS), (first, 0), value) for name, value in values.items()]

    def fresh(self, name: str) -> Path:
        """An empty directory."""
        barrier(self.world)
        if self.world.is_first:
            shutil.rmtree(self.directory / name, ignore_errors=True)
            (self.directory / name).mkdir(parents=True)
        barrier(self.world)
        return self.directory / name

    def timed(self, name: str, function: Callable[[], Any]) -> Any:
        """Calls the function; notes the time of the slowest rank."""
        lab.wait_quiet()
        barrier(self.world)
        start = time.perf_counter()
        result = function()
        self.times.setdefault(name, []).append(agree_max(time.perf_counter() - start, self.world))
        return result

    def round(self, saver: Checkpointer, number: int, group: Any) -> None:
        import torch.distributed.checkpoint as dcp

        place = str(self.fresh("dcp"))
        self.timed("dcp-save", lambda: dcp.save(self.state, checkpoint_id=place))
        peer_target = {name: torch.zeros_like(value) for name, value in self.state.items()}
        self.timed("dcp-load", partial(dcp.load, peer_target, checkpoint_id=place))
        del peer_target
        self.fresh("megalite")
        path = self.timed("save", lambda: saver.save(2 * number, self.shards(self.local), {}))
        target = {name: torch.zeros_like(value) for name, value in self.local.items()}
        self.timed("load", lambda: saver.load(path, self.shards(target)))
        assert all(torch.equal(target[name], value) for name, value in self.local.items())
        place = str(self.fresh("dcp-async"))
        future = self.timed(
            "dcp-async-blocked", lambda: dcp.async_save(self.state, checkpoint_id=place, process_group=group)
        )
        future.result()
        self.fresh("megalite")
        self.timed("async-blocked", lambda: saver.save_async(2 * number + 1, self.shards(self.local), {}))
        saver.wait()


def child(words: list[str]) -> None:
    """One rank; never returns."""
    parser = lab.parser(__doc__, "ckpt_megalite")
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--dir", default=os.path.join(tempfile.gettempdir(), "bench-ckpt-megalite"))
    arguments = parser.parse_args(words)
    import torch.distributed as dist

    rank = Rank(arguments)
    group = dist.new_group(backend="gloo")
    saver = Checkpointer(rank.directory / "megalite", world=rank.world)
    for number in range(arguments.rounds + 1):
        if number == 1:  # the round before was to warm up
            rank.times.clear()
        rank.round(saver, number, group)
    if rank.world.is_first:
        report(rank)
        shutil.rmtree(rank.directory, ignore_errors=True)
    barrier(rank.world)
    sys.stdout.flush()
    os._exit(0)


def report(rank: Rank) -> None:
    for name, base in PAIRS.items():
        ratios = [peer / ours for peer, ours in zip(rank.times[base], rank.times[name], strict=True)]
        row = {
            "bench": "ckpt",
            "variant": f"megalite-{name}",
            "params": {"procs": rank.world.size, "mb": round(rank.nbytes / 1e6)},
            "seconds": round(statistics.median(rank.times[name]), 4),
            "MB/s": round(rank.nbytes / 1e6 / statistics.median(rank.times[name])),
            "peer_seconds": round(statistics.median(rank.times[base]), 4),
            "ratio": {"vs": base, "median": round(statistics.median(ratios), 3), "min": round(min(ratios), 3)},
        }
        print(json.dumps(row), flush=True)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--procs", type=int, default=2)
    arguments, rest = parser.parse_known_args(words)
    return int(lab.launch(__file__, arguments.procs, ["--rank", *rest]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        child(sys.argv[2:])
    sys.exit(main(sys.argv[1:]))
