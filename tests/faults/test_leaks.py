"""A run of months holds no more at its end than at its beginning: memory, tensors, handles, files, threads."""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from equivalence.layouts import TINY

from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.testing import run_ranks
from megalite.train.run import open_run

LAYOUTS = {
    "cp2": ("--context-parallel-size", "2"),
    "param-offload": ("--offload", "params", "--zero-stage", "1"),
    "2bw predict": (
        *("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "2bw"),
        *("--staleness-correction", "predict"),
    ),
    "tp2": ("--tensor-model-parallel-size", "2"),
    "ep2": ("--expert-model-parallel-size", "2", "--num-experts", "4"),
    "zero2": ("--zero-stage", "2"),
    "zero3": ("--zero-stage", "3"),
}
MOST = {"tensors": 2, "bytes of tensors": 64, "open files": 0, "threads": 0, "shared memory": 0}
"""How much more there may be: two numbers of an iteration, which one layout or moment still holds."""
MOMENTS, APART_SECONDS = 5, 0.05


def command(layout: str, steps: int) -> list[str]:
    argv = [*TINY, "--num-layers", "4", "--micro-batch-size", "1", *LAYOUTS[layout]]
    argv[argv.index("--train-iters") + 1] = str(steps)
    argv[argv.index("--global-batch-size") + 1] = "4"
    return argv


def let_go() -> None:
    """A thread holds what it has worked on for a moment after others see it done, but not while it does the next thing:
    each of this process's threads does one."""
    pools = [found for found in gc.get_objects() if issubclass(type(found), ThreadPoolExecutor)]
    for pool in (pool for pool in pools if pool._threads and not pool._shutdown):
        assert pool._max_workers == 1, "nothing says which of several threads has let go"
        pool.submit(int).result()


def count() -> dict[str, int]:
    """What this process holds now and goes on holding: the least of a few moments. What has leaked is there at each.

    A thread of gloo's holds the tensor it has summed for some ms after the caller goes on, as it needs Python's lock to
    let go of it. gloo hands work to any of its threads: unlike a pool's one, it cannot be given the next thing to do.
    """
    moments = []
    for _ in range(MOMENTS):
        time.sleep(APART_SECONDS)  # others get Python's lock
        moments.append(count_once())
    return {key: min(moment[key] for moment in moments) for key in moments[0]}


def count_once() -> dict[str, int]:
    let_go()
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "objects": len(gc.get_objects()),
        "tensors": len(tensors),
        "bytes of tensors": sum(storages.values()),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared memory": sum("/dev/shm" in line for line in open("/proc/self/maps")),
        "resident kB": int(status["VmRSS"].split()[0]),
    }


def body_counts(world: World, argv: list[str], moments: list[int]) -> list[dict[str, int]]:
    """What the rank holds after these iterations; the pipeline has drained at each."""
    found = []
    with open_run(parse(argv, world_size=world.size), world) as opened:
        for step in range(1, moments[-1] + 1):
            opened.trainer.train_step(drain=step in moments)
            if step in moments:
                found.append(count())
    return found


SAMPLE = ("cp2", "param-offload", "2bw predict")


@pytest.mark.landing
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full) for name in LAYOUTS]
)
def test_forty_iterations_leave_nothing_behind(layout: str) -> None:
    for rank, (before, after) in enumerate(run_ranks(body_counts, 2, command(layout, 60), [20, 60])):
        more = {key: after[key] - before[key] for key in before}
        assert all(more[key] <= most for key, most in MOST.items()), f"rank {rank}: {more}"
        assert more["objects"] < 40, f"rank {rank}: one object an iteration or more: {more}"


@pytest.mark.full
@pytest.mark.parametrize("layout", SAMPLE)
def test_two_thousand_iterations_leave_nothing_behind(layout: str) -> None:
    counts = run_ranks(body_counts, 2, command(layout, 2000), [500, 2000], timeout=1200)
    for rank, (before, after) in enumerate(counts):
        more = {key: after[key] - before[key] for key in before}
        assert all(more[key] <= most for key, most in MOST.items()), f"rank {rank}: {more}"
        assert more["objects"] < 100 and more["resident kB"] < 6000, f"rank {rank}: 4 kB an iteration: {more}"
