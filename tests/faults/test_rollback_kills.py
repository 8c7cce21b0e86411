"""A run with a spike, an average of its weights and a rollback, killed anywhere: nothing of it is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
import torch
from equivalence.layouts import saved_tensors
from equivalence.test_rollback import ROLLBACK, command, planted_run

from megalite.checkpoint import committed, read_manifest
from megalite.testing import run_ranks, try_ranks

LAYOUTS = {
    "dp2": ("--zero-stage", "1"),
    "tp2": ("--tensor-model-parallel-size", "2", "--async-save"),
    "2bw": ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "2bw"),
}
POINTS = ("iteration", "action", "opt_step", "save.begin", "save.before_rename", "rollback.put_aside", "rollback.load")
MOST = {"iteration": 14, "action": 150, "opt_step": 10, "save.begin": 7, "save.before_rename": 6}
KEPT = ("spikes", "passed_over", "progress", "loss_scaler")
SPIKES = (7, 9)
"""The second one comes without progress, so that the range grows and its count is 2."""


@pytest.mark.parametrize(
    ("layout", "kills"),
    [
        pytest.param("dp2", 2, marks=pytest.mark.landing),
        *(pytest.param(name, 20, marks=pytest.mark.full) for name in LAYOUTS),
    ],
)
def test_killed_anywhere_it_keeps_window_average_ranges_and_count(layout: str, kills: int, tmp_path: Path) -> None:
    flags = (*ROLLBACK, *LAYOUTS[layout])
    run_ranks(planted_run, 2, command(tmp_path / "whole", *flags), SPIKES)
    wanted, tensors = meta_of(tmp_path / "whole"), saved_tensors(tmp_path / "whole")
    assert [each["rollbacks"] for each in wanted["passed_over"]] == [2]
    rng, killed = random.Random(layout), 0
    for trial in count():
        killed += kill(tmp_path / f"killed{trial}", flags, rng)
        assert meta_of(tmp_path / f"killed{trial}") == wanted, trial
        found = saved_tensors(tmp_path / f"killed{trial}")
        assert found.keys() == tensors.keys() and any(name.startswith("optimizer/ema/") for name in found)
        assert all(torch.equal(found[name], value) for name, value in tensors.items()), trial
        if killed == kills:
            break


def kill(folder: Path, flags: Sequence[str], rng: random.Random) -> bool:
    """Runs with a kill at a drawn place, then to the end; whether the place was reached."""
    point, rank = rng.choice(POINTS), rng.randrange(2)
    where = f":rank={rank}" if point.startswith(("save", "iteration")) else ""
    fault = f"kill@{point}{where}:after={rng.randrange(1, MOST.get(point, 2) + 1)}"
    argv = command(folder, *flags, "--auto-resume")
    case = try_ranks(planted_run, 2, argv, SPIKES, faults=[fault])
    run_ranks(planted_run, 2, argv, SPIKES)
    return case.outcome.culprit is not None


def meta_of(folder: Path) -> dict[str, object]:
    meta = read_manifest(committed(folder)[-1]).meta
    return {name: meta[name] for name in KEPT}
