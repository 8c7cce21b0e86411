"""The launch scripts: valid shell, and DRY_RUN=1 prints a command whose flags the parser accepts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megalite.config import parse

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/*.s[hb]*"), ROOT / ".ci" / "run"])
MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 16 --micro-batch-size 1 --lr 1 --mock-data "
    "--vocab-size 64"
)


def _dry_run(script: str, *arguments: str, **variables: str) -> list[str]:
    """Words of the command that the script would run."""
    environment = {"PATH": os.environ["PATH"]}
    result = subprocess.run(
        [str(ROOT / "scripts" / script), *arguments],
        env=environment | {"DRY_RUN": "1"} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return shlex.split(result.stdout)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_syntax(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_and_fail_on_the_first_error(script: Path) -> None:
    sourced = script.name == "environment.sh"
    assert os.access(script, os.X_OK) != sourced
    assert ("set -euo pipefail" in script.read_text()) != sourced


@pytest.mark.parametrize(
    ("script", "arguments", "variables", "launcher", "world_size"),
    [
        ("pretrain_gpt_1node.sh", ["data", "out"], {}, "torchrun --standalone --nproc-per-node 8", 8),
        (
            "pretrain_gpt_1node.sh",
            ["data", "out"],
            {"GPUS_PER_NODE": "2"},
            "torchrun --standalone --nproc-per-node 2",
            2,
        ),
        (
            "pretrain_gpt_multinode.sh",
            ["data", "tokenizer.json", "out"],
            {"MASTER_ADDR": "n0", "NODE_RANK": "3"},
            "torchrun --nproc-per-node 8 --nnodes 4 --node-rank 3 --master-addr n0 --master-port 6000",
            32,
        ),
        (
            "slurm.sbatch",
            ["out", *MODEL.split(), "--train-iters", "1"],
            {},
            "srun --kill-on-bad-exit=1 --cpus-per-task=8 python",
            8,
        ),
        (
            "mpirun.sh",
            [*MODEL.split(), "--train-iters", "1"],
            {"NP": "4", "HOSTS": "a:2,b:2", "MASTER_ADDR": "a"},
            "mpirun -np 4 --bind-to none --host a:2,b:2 -x MASTER_ADDR python",
            4,
        ),
    ],
)
def test_dry_run_prints_a_command_that_parses(
    script: str, arguments: list[str], variables: dict[str, str], launcher: str, world_size: int
) -> None:
    command = _dry_run(script, *arguments, "--seed", "77", **variables)
    start = command.index("pretrain_gpt.py")
    assert " ".join(command[:start]).startswith(launcher)
    flags = command[start + 1 :]
    if "GPT2BPETokenizer" in flags or "HuggingFaceTokenizer" in flags:
        flags += ["--vocab-size", "50257"]
    config = parse(flags, world_size=world_size, check_files=False)
    assert config.training.seed == 77


@pytest.mark.parametrize("script", ["pretrain_gpt_1node.sh", "pretrain_gpt_multinode.sh", "slurm.sbatch"])
def test_missing_arguments_show_the_usage(script: str) -> None:
    result = subprocess.run([str(ROOT / "scripts" / script)], capture_output=True, text=True)
    assert result.returncode != 0
    assert re.search(r"usage: .*SAVE_DIR", result.stderr)


@pytest.mark.parametrize(("status", "requeued"), [(0, True), (138, True), (1, False)])
def test_a_job_whose_time_is_up_is_requeued(status: int, requeued: bool, tmp_path: Path) -> None:
    """Five minutes before the limit SLURM signals the script; 138 are ranks that the signal met before training."""
    programs = {"srun": f"kill -USR1 $PPID\nsleep 0.5\nexit {status}", "scontrol": "echo $@ >> told", "scancel": "true"}
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    done = subprocess.run([str(ROOT / "scripts" / "slurm.sbatch"), "out"], env=environment, capture_output=True)
    assert done.returncode == status, done.stderr
    assert (tmp_path / "told").exists() == requeued
    assert not requeued or (tmp_path / "told").read_text() == "requeue 7\n"
