"""Modules of one's own on devices train as they do in one process of a CPU with torch's optimizer, in fp64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from equivalence.test_library import STEPS, body, numbers, plainly
from gpu.devices import DEVICES, NUM_GPUS

from megalite.testing import run_ranks

CASES: dict[str, tuple[str, int, int, int, int | None]] = {
    "one rank": ("1f1b", 1, 1, 0, None),
    "replicas, ZeRO 1": ("1f1b", 1, 2, 1, None),
    "replicas, ZeRO 3": ("1f1b", 1, 2, 3, None),
    "zero bubble": ("zb-h1", 2, 1, 0, None),
    "two chunks, ZeRO 3": ("breadth-first", 2, 2, 3, 2),
}
"""Schedule, stages, replicas, ZeRO stage, chunks: over NCCL where there is a GPU for each rank, else over gloo."""
ANYWHERE = [pytest.param("cpu", marks=pytest.mark.full), *DEVICES[1:]]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ANYWHERE)
def test_a_pipeline_is_plain_torch_on_a_cpu(name: str, device: str) -> None:
    schedule, pp, dp, zero_stage, chunks = CASES[name]
    losses, weights = plainly(dp)
    seen: set[str] = set()
    for found, own in run_ranks(body, pp * dp, schedule, pp, zero_stage, chunks, device=device, timeout=300.0):
        torch.testing.assert_close(numbers(found), numbers(losses), rtol=0, atol=1e-10)
        seen |= own.keys()
        for tensor, value in own.items():
            torch.testing.assert_close(value.cpu(), weights[tensor], rtol=0, atol=1e-10)
    assert seen == weights.keys()


SCRIPT = """
import json
import sys

import megalite
from equivalence.test_library import body


def train(world):
    losses, _ = body(world, "1f1b", 1, 1, None)
    return [list(pair) for pair in losses], world.device.type


if __name__ == "__main__":
    print(json.dumps(megalite.run(train, int(sys.argv[1]), device=sys.argv[2])))
"""


@pytest.mark.parametrize("device", ANYWHERE)
def test_run_starts_a_rank_for_each_device(device: str, tmp_path: Path) -> None:
    """`megalite.run` in a program of one's own, which makes the ranks and their devices itself."""
    ranks = min(2, NUM_GPUS) if device == "cuda" else 2
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(ranks), device]
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root.parent}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    found, where = json.loads(done.stdout.splitlines()[-1])
    losses, _ = plainly(ranks)
    assert where == device and len(found) == STEPS
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), numbers(losses), rtol=0, atol=1e-10)
