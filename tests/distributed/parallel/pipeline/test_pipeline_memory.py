"""A pipeline's memory does not grow with the number of iterations: what was sent is let go."""

from __future__ import annotations

import gc

import pytest
import torch
from equivalence.layouts import TINY

from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.testing import run_ranks
from megalite.train.run import open_run

PHASES = (8, 8, 16)


def storages_after(world: World, argv: list[str]) -> list[int]:
    """Bytes of all tensors that are alive after each phase."""
    found = []
    with open_run(parse(argv, world_size=world.size), world) as run:
        for iterations in PHASES:
            for _ in range(iterations):
                run.trainer.train_step(drain=False)
            found.append(bytes_alive())
    return found


def bytes_alive() -> int:
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.in_turn
@pytest.mark.parametrize("schedule", [pytest.param("shifted-critical-path", marks=pytest.mark.full), "2bw", "zb-v"])
def test_nothing_is_kept(schedule: str) -> None:
    layout = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", schedule, "--micro-batch-size", "1"]
    argv = [*TINY, "--num-layers", "4", *layout]
    argv[argv.index("--train-iters") + 1] = "40"
    for _, early, late in run_ranks(storages_after, 2, argv, timeout=90):
        assert late <= early * 1.02
