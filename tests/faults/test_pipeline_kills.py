"""A rank killed in the middle of a schedule: all ranks end, the first that failed is named, the resumed run is
bitwise."""

from __future__ import annotations

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


def body_launch(world: World, argv: list[str]) -> tuple[int, float]:
    began = time.monotonic()
    status = launch(parse(argv), run_training, LaunchEnvironment())
    return status, time.monotonic() - began


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
    run_ranks(whole_run, p, command(tmp_path / "whole", *layout))

    rng = random.Random(f"{schedule} {p}")
    rank, after = rng.randrange(p), rng.randrange(20, 60)
    folder = tmp_path / "killed"
    flags = command(folder, *layout, "--auto-resume", "--nprocs", str(p))
    fault = f"kill@action:rank={rank}:after={after}"
    status, elapsed = run_single(body_launch, flags, faults=[fault], env={"OMP_NUM_THREADS": None})
    output = capfd.readouterr().out
    assert status == 1
    assert re.search(f"^error: rank {rank} was killed by SIGKILL", output, re.MULTILINE), output
    assert elapsed < TIMEOUT_SECONDS + 10

    run_ranks(whole_run, p, command(folder, *layout, "--auto-resume"))
    expected, found = saved_tensors(tmp_path / "whole"), saved_tensors(folder)
    assert found.keys() == expected.keys() and STEPS == 6
    for tensor, value in expected.items():
        assert torch.equal(found[tensor], value), f"{fault}: {tensor}"
