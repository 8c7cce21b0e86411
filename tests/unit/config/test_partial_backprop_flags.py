"""`--partial-backprop-groups`: what is said against it, in one line each, and the warning."""

from __future__ import annotations

import pytest
from config_arguments import argv, problems_of

from megalite.config import parse
from megalite.config.rules.layout import warnings

FLAG = "--partial-backprop-groups"


@pytest.mark.parametrize(
    ("flags", "ranks", "line"),
    [
        (f"{FLAG} 5", 1, f"{FLAG}=5: more than the 4 layers; use 4 at most"),
        (
            f"{FLAG} 2 --zero-stage 2 --global-batch-size 4 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
            4,
            f"{FLAG}=2: not with --zero-stage=2 and --pipeline-schedule=zb-h1, whose ranks would sum unlike "
            "micro-batches; use 1f1b",
        ),
        (
            f"{FLAG} 2 --num-experts 4",
            1,
            f"{FLAG}=2: not with --num-experts, whose routers add a loss in every layer; drop one",
        ),
        (
            f"{FLAG} 2 --recompute-granularity full --recompute-method uniform",
            1,
            f"{FLAG}=2: not with --recompute-granularity, which runs layers where no depth is known; drop one",
        ),
        (
            f"{FLAG} 2 --calculate-per-token-loss",
            1,
            f"{FLAG}=2: not with --calculate-per-token-loss, whose means are over tokens; drop one",
        ),
        (
            f"{FLAG} 2 --global-batch-size 16 --rampup-batch-size 4 4",
            1,
            "--rampup-batch-size=4 4: expected three numbers, START INCREMENT SAMPLES",
        ),
        (
            f"{FLAG} 2 --global-batch-size 16 --rampup-batch-size 4 4 100",
            1,
            f"{FLAG}=2: not with --rampup-batch-size, whose steps have other depths; drop one",
        ),
    ],
)
def test_one_problem_gives_exactly_one_line(flags: str, ranks: int, line: str) -> None:
    assert problems_of(argv(f"--num-layers 4 {flags}"), ranks) == [line]


def test_it_is_warned_of() -> None:
    config = parse(argv(f"--num-layers 4 {FLAG} 4"), world_size=1, check_files=False)
    assert any(line.startswith("`partial_backprop_groups`=4: changes the optimisation") for line in warnings(config, 1))
