"""`--pipeline-schedule message-driven`: what is said against it, in one line each."""

from __future__ import annotations

import pytest
from config_arguments import argv, problems_of

FLAG = "--pipeline-schedule"
TWO = "--pipeline-model-parallel-size 2 --global-batch-size 4"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            f"{TWO} --pipeline-max-in-flight 3",
            "--pipeline-max-in-flight=3: 1f1b runs a fixed list; leave it out, or use "
            "--pipeline-schedule=message-driven",
        ),
        (
            f"{FLAG} message-driven {TWO} --offload params",
            f"{FLAG}=message-driven: not with --param-offload, which plans what moves when; use 1f1b",
        ),
        (
            f"{FLAG} message-driven {TWO} --offload embedding",
            f"{FLAG}=message-driven: not with --embedding-offload, whose rows are fetched ahead; use 1f1b",
        ),
        (
            f"{FLAG} message-driven {TWO} --device-memory-budget-gb 1",
            f"{FLAG}=message-driven: not with --device-memory-budget-gb, which plans what moves when; use 1f1b",
        ),
        (
            f"{FLAG} message-driven {TWO} --device cuda",
            f"{FLAG}=message-driven: is told by gloo what has arrived, not by NCCL; use --distributed-backend=gloo, "
            "or eager-1f1b",
        ),
        (
            f"{FLAG} message-driven {TWO} --pipeline-flush-steps 3",
            "--pipeline-flush-steps=3: message-driven flushes after every iteration; drop it, or use 2bw",
        ),
        (
            f"{FLAG} message-driven {TWO} --virtual-pipeline-model-parallel-size 2",
            "--virtual-pipeline-model-parallel-size=2: message-driven has 1 chunk per rank; leave it out, or use "
            "--pipeline-schedule=interleaved",
        ),
    ],
)
def test_what_it_cannot_do_is_one_line(flags: str, line: str) -> None:
    assert line in problems_of(argv(flags), 2)
