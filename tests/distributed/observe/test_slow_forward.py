"""A rank that is slow in its forward is named, or its stage where that has no other rank; an even run names nobody."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from megalite.comm.collectives import all_gather, all_reduce_, barrier
from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.nn.block import Block
from megalite.observe.observers import read_metrics
from megalite.testing import run_ranks
from megalite.train.run import run_training

LAYOUTS = {
    "dp": ["--global-batch-size", "4"],
    "tp": ["--tensor-model-parallel-size", "2"],
    "pp": ["--pipeline-model-parallel-size", "2"],
}


def _flags(save: str, layout: str) -> list[str]:
    model = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 64"
    training = "--micro-batch-size 2 --train-iters 8 --lr 1e-3 --eval-iters 0 --log-interval 4 --num-workers 0"
    return [*model.split(), *training.split(), *LAYOUTS[layout], "--save", save]


def body_train(world: World, save: str, layout: str, slow: int | None) -> None:
    """Train; rank `slow` sleeps 30 ms in each forward of a block."""
    config = parse(_flags(save, layout), world_size=world.size)
    forward = Block.forward

    def sleepy(self: Block, *inputs: object) -> torch.Tensor:
        time.sleep(0.03)
        return forward(self, *inputs)  # type: ignore[arg-type]

    if world.rank == slow:
        Block.forward = sleepy  # type: ignore[method-assign,assignment]
    assert run_training(config, world) == 0


@pytest.mark.parametrize(
    ("layout", "slow"),
    [
        ("dp", 0),
        ("tp", 1),
        ("pp", 1),
        pytest.param("dp", 1, marks=pytest.mark.full),
        pytest.param("tp", 0, marks=pytest.mark.full),
        pytest.param("pp", 0, marks=pytest.mark.full),
    ],
)
def test_the_slow_rank_is_named_within_two_intervals(tmp_path: Path, layout: str, slow: int) -> None:
    run_ranks(body_train, 2, str(tmp_path), layout, slow)
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if record["kind"] == "train"]
    said, other = ("slowest_stage", "slowest_rank") if layout == "pp" else ("slowest_rank", "slowest_stage")
    assert [record.get(said) for record in records] == [None, slow]
    assert [record.get(other) for record in records] == [None, None]


def test_an_even_run_names_nobody(tmp_path: Path) -> None:
    run_ranks(body_train, 2, str(tmp_path), "tp", None)
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if record["kind"] == "train"]
    assert [record.get("slowest_rank") for record in records] == [None, None]


def body_waits(world: World) -> float:
    """Seconds that this rank waited in collectives to which rank 1 came 0.2 s late, twice."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size)
    barrier(mesh.world)
    mesh["dp"].waits.take()
    for _ in range(2):
        if world.rank == 1:
            time.sleep(0.2)
        handle = all_reduce_(torch.ones(4), mesh["dp"], async_op=True)
        handle.wait()
        all_gather(torch.ones(4), mesh.world)
    waited = mesh.waits.take()  # the axes of a mesh share one clock
    assert mesh["dp"].waits.take() == 0.0
    return waited


def test_waiting_is_counted_where_it_happens() -> None:
    early, late = run_ranks(body_waits, 2)
    assert 0.3 < early < 0.6
    assert late < 0.1
