"""A branch of a WSD run is the run that would have been that long from the start (docs/months.md)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equivalence.layouts import TINY, saved_tensors
from megalite.comm.world import World
from megalite.config import parse
from megalite.testing import run_ranks, run_single
from megalite.train.run import run_training

WSD = ("--lr-decay-style", "WSD", "--lr-wsd-decay", "iters=2", "style=cosine", "--ema-decay", "0.5")


def run(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


def command(folder: Path, steps: int, *more: str) -> list[str]:
    argv = [*TINY, "--num-layers", "2", "--micro-batch-size", "1", "--global-batch-size", "4", *WSD]
    argv[argv.index("--train-iters") + 1] = str(steps)
    return [*argv, "--save", str(folder), "--save-interval", "2", *more]


@pytest.mark.parametrize("layout", ["", "--zero-stage 1", "--tensor-model-parallel-size 2"])
def test_a_branch_is_a_run_of_that_length(layout: str, tmp_path: Path) -> None:
    run_single(run, command(tmp_path / "trunk", 8))
    run_single(run, command(tmp_path / "short", 6))
    leaves = ("--load", str(tmp_path / "trunk"), "--ckpt-step", "2", "--override-opt-param-scheduler")
    run_ranks(run, 2 if layout else 1, command(tmp_path / "branch", 6, *leaves, *layout.split()))
    for step, trunk in ((4, "trunk"), (6, "short")):  # the decay begins behind iteration 4
        wanted, found = (saved_tensors(tmp_path / name / f"iter_{step:07d}") for name in (trunk, "branch"))
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            if layout:
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)
            else:
                assert torch.equal(found[name], value), name
    cooled, whole = (saved_tensors(tmp_path / name / "iter_0000006") for name in ("branch", "trunk"))
    assert any(not torch.equal(cooled[name], value) for name, value in whole.items())
