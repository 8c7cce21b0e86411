"""Values that no run can mean: one line each, before anything is built, allocated or opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_arguments import argv

from megalite.config import parse
from megalite.errors import ConfigError
from megalite.launch.launcher import launch

LINES = [
    (["--seed", "4294967296"], "--seed=4294967296: must be >= 0 and <= 4294967295; try 4294967295"),
    (
        ["--train-iters", "1e12"],
        "--train-iters=1000000000000: must be >= 1 and <= 1000000000; to only evaluate use --skip-train",
    ),
    (["--num-workers", "100000"], "--num-workers=100000: must be >= 0 and <= 256; try 256"),
    (["--save", ""], "--save: expected a value"),
    (["--save", "a\0b"], "--save: expected a text of one line, without NUL"),
    (["--data-cache-path", "a\nb"], "--data-cache-path: expected a text of one line, without NUL"),
    (
        ["--recompute-granularity", "full", "--recompute-num-layers", "40"],
        "--recompute-num-layers=40: more than --num-layers=8",
    ),
    (
        ["--use-parallel-residual", "--norm-placement", "post"],
        "--norm-placement=post: not with --use-parallel-residual; drop one of them",
    ),
    (
        ["--position-embedding-type", "rope", "--rope-scaling", "type=yarn", "beta_fast=1"],
        "--rope-scaling beta_fast=1: not above --yarn-beta-slow=1; the paper has 32 and 1",
    ),
    (
        ["--window-rotary-base", "1e4", "--window-size", "4", "--position-embedding-type", "rope"],
        "--window-rotary-base=10000: every layer has the window; give --rotary-base, or --window-attn-skip-freq",
    ),
    (
        ["--global-batch-size", "1e6"],
        "--global-batch-size=1000000: 1,000,000 micro-batches in one iteration of a replica, at most 65,536; use a "
        "larger --micro-batch-size, or more replicas",
    ),
    (
        ["--step-batch-size-schedule", "0:8 1B:1000000"],
        "--step-batch-size-schedule='0:8 1B:1000000': 1,000,000 micro-batches in one iteration, at most 65,536",
    ),
]


def problems_of(arguments: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    return caught.value.problems


@pytest.mark.parametrize(("more", "line"), LINES, ids=[row[0][0] + str(n) for n, row in enumerate(LINES)])
def test_a_senseless_value_is_one_line(more: list[str], line: str) -> None:
    base = argv(without=more[0][2:])
    assert problems_of([*base, *more]) == [line]


def test_one_key_flat_and_in_its_section_is_a_duplicate(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("seed: 1\ntraining:\n  seed: 2\n")
    line = f"{file}:3: duplicate key 'seed' (first at {file}:1)"
    assert problems_of([*argv(), "--config", str(file)]) == [line]


def test_ranks_that_no_host_holds_are_not_started(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse([*argv(), "--nprocs", "10000000", "--global-batch-size", "10000000"])
    assert launch(config, lambda config, world: 0) == 2
    assert "--nprocs=10000000: this host has" in capsys.readouterr().err
