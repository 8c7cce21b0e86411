"""A checkpoint of any stage, optimizer and number format resumes at the same layout bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from equivalence.layouts import TINY, train_body

from megalite.checkpoint import CheckpointReader, latest
from megalite.testing import run_ranks

CASES = {
    "adam": "",
    "sgd": "--optimizer sgd",
    "lion": "--optimizer lion --bf16 --optimizer-state exp_avg_dtype=bf16",
    "muon": "--optimizer muon",
    "soap": "--optimizer soap --optimizer-args soap_precondition_frequency=1",
    "shampoo": "--optimizer shampoo --optimizer-args shampoo_precondition_frequency=3 shampoo_max_precond_dim=20",
    "kfac": "--optimizer kfac --optimizer-args kfac_inverse_frequency=3 kfac_factors=own",
    "adafactor": "--optimizer adafactor --bf16",
    "bf16 moments": "--bf16 --optimizer-state exp_avg_dtype=bf16 exp_avg_sq_dtype=bf16 --grad-reduce-in-bf16",
    "remainders": "--bf16 --optimizer-state param_remainders",
    "offload": "--bf16 --offload optimizer fraction=0.5 --ddp-bucket-size 3000",
    "fp16": "--fp16 --loss-scaling initial=1048576",
}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    path = latest(folder)
    assert path is not None
    reader = CheckpointReader(path)
    return {name: reader.read(name) for name in reader.names}


def assert_resumes(folder: Path, flags: str, world_size: int) -> None:
    wide = not any(flag in flags for flag in ("--bf16", "--fp16"))
    argv = [flag for flag in TINY if wide or flag != "--fp64"]
    argv += ["--num-layers", "2", "--micro-batch-size", "2", "--hidden-dropout", "0.1", *flags.split()]
    argv += ["--data-cache-path", str(folder / "cache")]
    whole, part = str(folder / "whole"), str(folder / "part")
    losses = run_ranks(train_body, world_size, [*argv, "--save", whole], 4)[0][0]
    before = run_ranks(train_body, world_size, [*argv, "--save", part], 2)[0][0]
    after = run_ranks(train_body, world_size, [*argv, "--save", part, "--auto-resume"], 2)[0][0]
    assert [*before, *after] == losses
    expected, found = stored(folder / "whole"), stored(folder / "part")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.in_turn
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_any_stage_resumes_bitwise(stage: int, tmp_path: Path) -> None:
    assert_resumes(tmp_path, f"--zero-stage {stage}", 2)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", CASES)
def test_any_optimizer_resumes_bitwise(name: str, tmp_path: Path, full: bool) -> None:
    for stage in range(4) if full else [2]:
        assert_resumes(tmp_path / str(stage), f"--zero-stage {stage} {CASES[name]}", 2)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "layout",
    ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--num-distributed-optimizer-instances 2"],
)
def test_any_grid_resumes_bitwise(layout: str, stage: int, tmp_path: Path) -> None:
    assert_resumes(tmp_path, f"--zero-stage {stage} {layout}", 4)
