"""A run that is killed anywhere and started again ends with the same bits as one that was never stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
import torch
from equivalence.layouts import TINY, least_budget, saved_tensors

from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.testing import run_ranks, try_ranks
from megalite.train.run import run_training

STEPS = 6
ROOT = Path(__file__).parents[2]


def whole_run(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


FORMATS = ("--fp64", "--no-fp64", "--bf16")
"""fp64, fp32, bf16: bits are equal in all of them, for a resumed run adds up in the order of the whole one."""


def command(folder: Path, *more: str) -> list[str]:
    argv = [
        *(flag for flag in TINY if flag != "--fp64" or not set(more) & set(FORMATS)),
        "--num-layers",
        "4",
        "--micro-batch-size",
        "1",
        "--hidden-dropout",
        "0.1",
    ]
    argv[argv.index("--train-iters") + 1] = str(STEPS)
    (files := folder.parent / "files").mkdir(exist_ok=True)
    more = tuple(flag.replace("FILES", str(files)) for flag in more)
    argv += ["--save", str(folder), "--save-interval", "2", "--data-cache-path", str(folder.parent / "c")]
    argv += (flag for flag in more if flag != "BUDGET")
    return [*argv, *least_budget(argv, 2)] if "BUDGET" in more else argv


LAYOUTS = {
    "2bw": ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "2bw"),
    "zb-v": ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zb-v"),
    "zero2 ep2": (
        *("--zero-stage", "2", "--async-save", "--num-experts", "4", "--expert-model-parallel-size", "2"),
        *("--moe-router", "score_function=sigmoid", "expert_bias"),
    ),
    "tp": ("--tensor-model-parallel-size", "2"),
}
GPIPE = ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "gpipe", "--ddp-bucket-size", "3000")
IN_FILE = ("--offload", "path=FILES", "--ddp-bucket-size", "3000")
TIERS = {
    "host": ("--offload", "optimizer", "--optimizer-offload-fraction", "0.5", "--zero-stage", "2"),
    "weights": ("--offload", "params", "--zero-stage", "1"),
    "delayed": ("--delayed-parameter-update", "--offload", "optimizer", "--zero-stage", "1"),
    "file": ("--delayed-parameter-update", *IN_FILE),
    "budget": (*GPIPE, "BUDGET"),
    "budget and file": (*GPIPE, "BUDGET", *IN_FILE),
}
"""Weights, gradients, masters, moments, activations off the device: 10 kills each with --full."""
LAYOUTS |= TIERS
OFTEN = [name if name not in TIERS else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
POINTS = ("iteration", "action", "grad_reduce", "opt_step", "save.begin", "save.shard_written", "save.before_rename")
MOVING = ("action:kind=EVICT", "action:kind=PREFETCH")


@pytest.mark.in_turn
@pytest.mark.parametrize("name", OFTEN)
def test_killed_anywhere_it_ends_with_the_same_bits(name: str, tmp_path: Path, full: bool, fresh: int) -> None:
    for number in FORMATS if full else FORMATS[fresh % 3 :][:1]:
        folder = tmp_path / number.strip("-")
        folder.mkdir()
        kill_and_compare(folder, (*LAYOUTS[name], number), random.Random(f"{name} {number}"), 10 if full else 1)


def kill_and_compare(folder: Path, flags: Sequence[str], rng: random.Random, kills: int) -> None:
    """Tensors of a run that is not stopped, and of as many that are killed at drawn places and started again."""
    run_ranks(whole_run, 2, command(folder / "whole", *flags))
    expected, killed = saved_tensors(folder / "whole"), 0
    points = (*POINTS, *["opt_bucket"] * 2 * any("FILES" in flag for flag in flags), *MOVING * ("BUDGET" in flags))
    most = {"action": 120, "iteration": STEPS, "opt_bucket": 70, **dict.fromkeys(MOVING, 6)}
    for trial in count():
        again = folder / f"killed{trial}"
        point, rank = rng.choice(points), rng.randrange(2)
        hits = rng.randrange(1, most.get(point, 3))
        where = f":rank={rank}" if point.startswith(("save", "iteration")) else ""
        fault = f"kill@{point}{where}:after={hits}"
        case = try_ranks(whole_run, 2, command(again, *flags, "--auto-resume"), faults=[fault])
        killed += case.outcome.culprit is not None
        run_ranks(whole_run, 2, command(again, *flags, "--auto-resume"))
        found = saved_tensors(again)
        assert found.keys() == expected.keys()
        for tensor, value in expected.items():
            assert torch.equal(found[tensor], value), f"{fault}: {tensor}"
        if killed == kills:
            break


def long_command(folder: Path, *more: str) -> list[str]:
    """60 iterations, saved at the end alone."""
    argv = command(folder, *more)
    argv[argv.index("--train-iters") + 1] = "60"
    argv[argv.index("--save-interval") + 1] = "1000"
    return argv


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """That run on two local ranks, through the command line."""
    flags = [flag for flag in long_command(folder, *more) if flag != "--no-exit-signal-handler"]
    argv = [sys.executable, "pretrain_gpt.py", *flags, "--nprocs", "2", "--log-interval", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)


def stop(running: subprocess.Popen[str], number: signal.Signals, iteration: int) -> None:
    """Sends the launcher a signal when `iteration` has been told; the run must end in order."""
    assert running.stdout is not None
    for line in running.stdout:
        if "iteration" in line and f" {iteration}/" in line:
            break
    running.send_signal(number)
    running.stdout.read()
    assert running.wait(timeout=120) == 0


@pytest.mark.landing
def test_signals_save_and_exit_0_and_the_resumed_run_is_the_same(tmp_path: Path) -> None:
    """As a scheduler does it: the signal goes to the launcher; one kind first, the other after the resume."""
    folder = tmp_path / "stopped"
    stop(start(folder), signal.SIGTERM, 5)
    saved = [int(path.name[5:]) for path in folder.glob("iter_*")]
    assert len(saved) == 1 and 5 <= saved[0] < 60, saved
    assert not (folder / "COMPLETED").exists()
    again = saved[0] + 5
    stop(start(folder, "--auto-resume"), signal.SIGUSR1, again)
    saved = sorted(int(path.name[5:]) for path in folder.glob("iter_*"))
    assert len(saved) == 2 and again <= saved[1] < 60, saved
    assert not (folder / "COMPLETED").exists()
    resumed = start(folder, "--auto-resume")
    assert resumed.communicate(timeout=300)[0] and resumed.returncode == 0
    assert (folder / "COMPLETED").exists()
    run_ranks(whole_run, 2, long_command(tmp_path / "whole"))
    found, expected = saved_tensors(folder), saved_tensors(tmp_path / "whole")
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        assert torch.equal(found[tensor], value), tensor
