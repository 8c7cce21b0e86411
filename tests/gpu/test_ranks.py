"""Several ranks: over NCCL where there is a GPU for each, over gloo where ranks share one (a dress rehearsal)."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import TINY, assert_same_tensors, saved_tensors, train_body
from gpu.devices import NUM_GPUS, needs_cuda, needs_gpus

from megalite.comm import ParallelMesh, barrier
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.config.parallel import SCHEDULES
from megalite.observe.observers import read_metrics
from megalite.testing import run_ranks
from megalite.testing.oracle import reference

HALVES = "--micro-batch-size 2 --tp-comm-overlap"
GRIDS = {
    "dp, ZeRO 1": (2, "--zero-stage 1"),
    "dp, ZeRO 3": (2, "--zero-stage 3"),
    "tp, sequence parallel": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp, halves take turns": (2, f"--tensor-model-parallel-size 2 {HALVES}"),
    "tp, sequence parallel, halves": (2, f"--tensor-model-parallel-size 2 --sequence-parallel {HALVES}"),
    "pp": (2, "--pipeline-model-parallel-size 2"),
    "tp, pp, dp": (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1"),
}


def trained(device: str, ranks: int, *flags: str, steps: int = 3) -> dict[str, torch.Tensor]:
    """What `steps` iterations on `ranks` ranks leave."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [*TINY, "--num-layers", "4", "--micro-batch-size", "1", "--device", device, *flags]
        argv += ["--save", folder, "--data-cache-path", str(Path(folder).parent / "megalite-test-cache")]
        run_ranks(train_body, ranks, argv, steps, device=device, timeout=300.0)
        return saved_tensors(folder)


def check(device: str, ranks: int, flags: str, tolerance: float = 1e-10) -> None:
    found = trained(device, ranks, *flags.split())
    expected = reference((*TINY, "--micro-batch-size", "1", "--num-layers", "4"), 3)
    assert_same_tensors(found, expected, tolerance)


@pytest.mark.parametrize("name", GRIDS)
def test_nccl_ranks_are_the_oracle(name: str) -> None:
    ranks, flags = GRIDS[name]
    if ranks > NUM_GPUS:
        pytest.skip(f"needs {ranks} CUDA devices")
    check("cuda", ranks, flags)


REHEARSED = [name for name in SCHEDULES if name not in ("pipedream", "2bw", "eager-1f1b")]


@needs_cuda
@pytest.mark.parametrize("schedule", REHEARSED)
def test_ranks_that_share_one_gpu_are_the_oracle(schedule: str) -> None:
    """gloo carries what NCCL refuses to: two ranks of one device."""
    chunks = "--virtual-pipeline-model-parallel-size 2" if schedule in ("interleaved", "breadth-first") else ""
    flags = f"--pipeline-model-parallel-size 2 --pipeline-schedule {schedule} --distributed-backend gloo {chunks}"
    check("cuda", max(2, NUM_GPUS + 1) if NUM_GPUS < 2 else 2, flags)


@needs_cuda
@pytest.mark.parametrize("split", ["", "--sequence-parallel"])
def test_halves_of_ranks_that_share_one_gpu_are_the_oracle(split: str) -> None:
    check("cuda", 2, f"--tensor-model-parallel-size 2 {split} {HALVES} --distributed-backend gloo")


def body_slow_device(world: World, save: str) -> None:
    """Trains; the last rank's device does nothing for a while in each forward of a block."""
    from megalite.nn import Block
    from megalite.train.run import run_training

    forward = Block.forward

    def sleepy(self: Block, *inputs: Any) -> torch.Tensor:
        torch.cuda._sleep(50_000_000)
        return forward(self, *inputs)

    if world.rank == world.size - 1:
        Block.forward = sleepy  # type: ignore[method-assign]
    flags = "--num-layers 4 --micro-batch-size 1 --log-interval 4 --device cuda --train-iters 12"
    argv = [*TINY, *flags.split(), "--save", save, "--data-cache-path", f"{save}-cache"]
    run_training(parse(argv, world_size=world.size), world)


@needs_gpus(2)
def test_a_slow_device_is_named(tmp_path: Path) -> None:
    """Its host is as fast as the others', which wait for it on their streams."""
    run_ranks(body_slow_device, 2, str(tmp_path), device="cuda", timeout=300.0)
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if record["kind"] == "train"]
    assert records[-1].get("slowest_rank") == 1


def body_barrier(world: World) -> float:
    """Seconds that this rank waited for the one that comes late."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size)
    barrier(mesh.world)
    if world.rank == 0:
        time.sleep(0.5)
    began = time.perf_counter()
    barrier(mesh.world)
    return time.perf_counter() - began


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpus(2))])
def test_a_barrier_stops_the_host(device: str) -> None:
    late, waits = run_ranks(body_barrier, 2, device=device)
    assert waits > 0.4 and late < 0.4


COMPILED = {
    "tp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "tp, halves": f"--tensor-model-parallel-size 2 --sequence-parallel {HALVES}",
    "ZeRO 1": "--zero-stage 1",
    "ZeRO 3": "--zero-stage 3",
}


@needs_gpus(2)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_over_nccl(name: str) -> None:
    """With dropout, too, which is keyed: eager and compiled draw the same."""
    more = ["--hidden-dropout", "0.1", *COMPILED[name].split()]
    plain, compiled = (trained("cuda", 2, *more, *extra) for extra in ([], ["--compile"]))
    for tensor, value in plain.items():
        assert float((compiled[tensor] - value).abs().max()) < 1e-9, tensor


def body_overlap(world: World) -> list[float]:
    """Milliseconds of a large reduction, of products, and of both together."""
    from megalite.comm import all_reduce_

    mesh = ParallelMesh.build(rank=world.rank, size=world.size)
    numbers, matrix = torch.ones(1 << 27, device="cuda"), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def timed(work: Any) -> float:
        work()
        torch.cuda.synchronize()
        barrier(mesh.world)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    def products() -> None:
        for _ in range(10):
            matrix @ matrix

    def both() -> None:
        handle = all_reduce_(numbers, mesh.world, async_op=True)
        products()
        handle.wait()

    return [timed(lambda: all_reduce_(numbers, mesh.world)), timed(products), timed(both)]


@needs_gpus(2)
def test_a_reduction_runs_behind_products() -> None:
    reduction, products, together = run_ranks(body_overlap, 2, device="cuda")[0]
    assert together < 0.9 * (reduction + products)
