"""A rank killed in the middle of a schedule: all ranks end, the first that failed is named, the resumed run is
bitwise."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path

import pytest
import torch
from equivalence.layouts import ARRIVES, FLUSH, saved_tensors
from faults.test_training_kills import STEPS, command, whole_run

from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.launch.launcher import LaunchEnvironment, launch
from megalite.testing import run_ranks, run_single
from megalite.train.run import run_training

TIMEOUT_SECONDS = 12.0
"""--distributed-timeout-minutes of the runs here, in seconds."""
SCHEDULES = [*FLUSH, ARRIVES, "2bw", "pipedream"]
CHUNKS = {"interleaved": "2", "breadth-first": "2"}


def body_launch(world: World, argv: list[str]) -> tuple[int, float, str]:
    """Exit status, seconds, ranks that are left."""
    began = time.monotonic()
    status = launch(parse(argv), run_training, LaunchEnvironment())
    left = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return status, time.monotonic() - began, left


@pytest.mark.parametrize(
    ("schedule", "p"),
    [
        pytest.param(name, p, marks=() if (name, p) == ("2bw", 2) else pytest.mark.full)
        for p in (2, 4)
        for name in SCHEDULES
    ],
)
def test_a_killed_rank_is_named_and_the_resumed_run_is_bitwise(
    schedule: str, p: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layout = ["--pipeline-model-parallel-size", str(p), "--pipeline-schedule", schedule]
    layout += ["--virtual-pipeline-model-parallel-size", CHUNKS[schedule]] if schedule in CHUNKS else []
    layout += ["--num-layers", "8", "--untie-embeddings-and-output-weights"]
    layout += ["--clip-grad", "0"] if schedule == "pipedream" else []
    rng = random.Random(f"{schedule} {p}")
    kill_and_resume(layout, p, rng.randrange(p), rng.randrange(20, 60), tmp_path, capfd)


@pytest.mark.landing
def test_a_killed_rank_of_a_grid_is_named_and_the_resumed_run_is_bitwise(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two by two ranks: the first of the second row, whose neighbours both wait for it."""
    layout = ["--tensor-model-parallel-size", "4", "--tensor-parallel-mode", "2d", "--micro-batch-size", "2"]
    kill_and_resume(layout, 4, 2, 30, tmp_path, capfd)


def kill_and_resume(
    layout: list[str], p: int, rank: int, after: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`rank` of p dies at its action `after`: it is named, nobody survives it, and what follows is bitwise a run that
    was never stopped."""
    run_ranks(whole_run, p, command(tmp_path / "whole", *layout))
    folder = tmp_path / "killed"
    flags = command(folder, *layout, "--auto-resume", "--nprocs", str(p))
    fault = f"kill@action:rank={rank}:after={after}"
    status, elapsed, left = run_single(body_launch, flags, faults=[fault], env={"OMP_NUM_THREADS": None})
    output = capfd.readouterr().out
    assert status == 1 and not left
    assert re.search(f"^error: rank {rank} was killed by SIGKILL", output, re.MULTILINE), output
    assert elapsed < TIMEOUT_SECONDS + 10

    run_ranks(whole_run, p, command(folder, *layout, "--auto-resume"))
    expected, found = saved_tensors(tmp_path / "whole"), saved_tensors(folder)
    assert found.keys() == expected.keys() and STEPS == 6
    for tensor, value in expected.items():
        assert torch.equal(found[tensor], value), f"{fault}: {tensor}"
