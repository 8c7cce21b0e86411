"""Blocks by CUDA graphs on a real device have the bits of blocks without."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from equivalence.layouts import TINY
from gpu.devices import NUM_GPUS, needs_cuda

from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.nn import graphs
from megalite.testing import run_ranks
from megalite.train.run import open_run

STEPS = 5
BRIEF = "--num-layers 2 --global-batch-size 8 --micro-batch-size 1 --deterministic-mode --device cuda".split()
LLAMA = "--model-type llama --num-query-groups 2"
CASES = {
    "fp64": (1, ""),
    "bf16": (1, "--bf16"),
    "llama": (1, f"{LLAMA} --bf16 --recompute-activations"),
    "compiled": (1, f"{LLAMA} --bf16 --compile --hidden-dropout 0.1"),
    "ZeRO 2": (2, "--bf16 --zero-stage 2"),
    "1F1B": (2, "--bf16 --pipeline-model-parallel-size 2"),
    "a split backward": (2, "--bf16 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
}


def body(world: World, argv: list[str]) -> tuple[list[Any], int]:
    """(Losses, norms and weights; blocks that were replayed)."""
    replays, found = 0, []
    right = graphs.Lane.forward

    def counting(lane: graphs.Lane, index: int) -> torch.Tensor:
        nonlocal replays
        replays += 1
        return right(lane, index)

    with (
        patch.object(graphs.Lane, "forward", counting),
        open_run(parse(argv, world_size=world.size), world) as run,
    ):
        for step in range(STEPS):
            stats = run.trainer.train_step(drain=step == STEPS - 1)
            found.append((float(stats.lm_loss), float(stats.grad_norm)))
        for buffers in run.state.model.families:
            buffers.weights.wait()
        modules = [module for stage in run.state.model.stages.values() for module in stage.modules]
        found += [p.detach().cpu().clone() for module in modules for p in module.parameters()]
    return found, replays


@needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_graphs_have_the_bits_of_what_they_replace(name: str) -> None:
    ranks, layout = CASES[name]
    argv = [*(word for word in TINY if word != "--fp64" or "16" not in layout), *BRIEF, *layout.split()]
    argv += ["--distributed-backend", "gloo"] if ranks > NUM_GPUS else []
    plain = run_ranks(body, ranks, argv, device="cuda", timeout=300.0)
    graphed = run_ranks(body, ranks, [*argv, "--cuda-graph-impl", "local"], device="cuda", timeout=300.0)
    for (expected, none), (found, some) in zip(plain, graphed, strict=True):
        assert none == 0 and some > 20
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
