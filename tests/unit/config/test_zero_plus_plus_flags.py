"""`--zero-plus-plus`: what is said against it, in one line each."""

from __future__ import annotations

import pytest
from config_arguments import argv, problems_of

ROWS = [
    (
        "--zero-plus-plus weights --zero-stage 2 --global-batch-size 4",
        4,
        "--zero-plus-plus weights: needs --zero-stage=3, whose weights are gathered; it is 2",
    ),
    (
        "--zero-plus-plus gradients --zero-stage 3",
        1,
        "--zero-plus-plus gradients: one rank holds all weights of a stage, so nothing travels; leave it out, or add "
        "ranks",
    ),
    (
        "--zero-plus-plus partition=3 --zero-stage 3 --global-batch-size 4",
        4,
        "--zero-plus-plus partition=3: does not divide the 4 ranks over which weights are sharded; use 2",
    ),
    (
        "--zero-plus-plus partition=4 --zero-stage 3 --stage-meshes 1x4,1x6,1x1 --global-batch-size 12",
        11,
        "--zero-plus-plus partition=4: does not divide the 6 ranks over which weights are sharded; use 2",
    ),
    (
        "--zero-plus-plus weights --zero-stage 3 --stage-meshes 2x1,1x1",
        3,
        "--zero-plus-plus weights: one rank holds all weights of a stage, so nothing travels; leave it out, or add "
        "ranks",
    ),
    (
        "--zero-plus-plus partition=2 --zero-stage 3 --global-batch-size 4 --num-experts 4",
        4,
        "--zero-plus-plus partition=2: not with --num-experts, which are sharded over other ranks; drop one",
    ),
    (
        "--zero-plus-plus weights --zero-stage 3 --global-batch-size 4 --offload params",
        4,
        "--zero-plus-plus weights: not with --offload params, whose weights come from the host; drop one",
    ),
]


@pytest.mark.parametrize(("flags", "ranks", "line"), ROWS)
def test_one_problem_gives_exactly_one_line(flags: str, ranks: int, line: str) -> None:
    assert problems_of(argv(flags), ranks) == [line]
