"""What `--param-offload` excludes: one line each, which names the flag and the fix."""

from __future__ import annotations

import pytest
from config_arguments import argv, problems_of

ROWS = [
    (
        "--param-offload cpu --delayed-parameter-update",
        1,
        "--param-offload=cpu: not with --delayed-parameter-update, which keeps two versions of the weights; drop one",
    ),
    (
        "--param-offload cpu --pipeline-schedule 2bw",
        1,
        "--param-offload=cpu: not with --pipeline-schedule=2bw, which keeps two versions of the weights; use 1f1b",
    ),
    (
        "--param-offload cpu --bf16 --store-param-remainders",
        1,
        "--store-param-remainders: excludes --param-offload=cpu; give one of them",
    ),
    (
        "--param-offload cpu --compile",
        1,
        "--param-offload=cpu: not with --compile, whose code reads weights where they were; drop one",
    ),
    (
        "--param-offload cpu --zero-stage 3 --pipeline-schedule breadth-first --pipeline-model-parallel-size 2 "
        "--virtual-pipeline-model-parallel-size 2 --global-batch-size 2",
        2,
        "--param-offload=cpu: not with --zero-stage=3 and --pipeline-schedule=breadth-first, which keeps a stage's "
        "weights on the device; use --zero-stage=2, or --pipeline-schedule=1f1b",
    ),
]


@pytest.mark.parametrize(("flags", "world_size", "line"), ROWS, ids=[row[0] for row in ROWS])
def test_one_line_says_what_excludes_it(flags: str, world_size: int, line: str) -> None:
    assert problems_of(argv(flags), world_size) == [line]
