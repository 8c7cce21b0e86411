"""Rules of `--embedding-offload`: (flags) -> the exact line, and nothing but this line."""

from __future__ import annotations

import pytest
from config_arguments import argv, problems_of

from megalite.config import cache_problem, parse, with_vocab_size

PP = "--pipeline-model-parallel-size"
ROWS = "--embedding-offload cpu --untie-embeddings-and-output-weights"

ONE_LINE = [
    (
        "--embedding-offload cpu",
        1,
        "--embedding-offload=cpu: a tied output layer reads every row; needs --untie-embeddings-and-output-weights",
    ),
    ("--embedding-lookahead 1", 1, "--embedding-lookahead=1: needs --embedding-offload"),
    (
        f"{ROWS} --optimizer adafactor",
        1,
        "--embedding-offload=cpu: not with --optimizer=adafactor, whose step of a row depends on all; use adam",
    ),
    (
        f"{ROWS} --optimizer-impl apex",
        1,
        "--embedding-offload=cpu: not with --optimizer-impl=apex, which steps on GPUs alone; use torch",
    ),
    (
        f"{ROWS} --lora-rank 2",
        1,
        "--embedding-offload=cpu: not with --lora-rank=2, beside which no embedding is trained; drop it",
    ),
    (
        f"{ROWS} --delayed-parameter-update",
        1,
        "--embedding-offload=cpu: not with --delayed-parameter-update, which reads older weights; drop one",
    ),
    (
        f"{ROWS} {PP} 2 --pipeline-schedule 2bw --global-batch-size 4",
        2,
        "--embedding-offload=cpu: not with --pipeline-schedule=2bw, which keeps older weights; use 1f1b",
    ),
    (
        f"{ROWS} --embedding-cache-rows 63",
        1,
        "--embedding-cache-rows=63: a micro-batch may use 64 rows at once; use 64 or more, or a smaller "
        "--micro-batch-size",
    ),
]


@pytest.mark.parametrize(("flags", "world_size", "line"), ONE_LINE)
def test_a_problem_is_one_line(flags: str, world_size: int, line: str) -> None:
    assert problems_of(argv(flags), world_size) == [line]


def test_the_size_of_the_cache() -> None:
    """Of one micro-batch more than looked ahead, at most this rank's part of the vocabulary (100, padded to 128)."""
    config = parse(argv(f"{ROWS} --embedding-lookahead 0"))
    assert (config.embedding_rows, config.cached_rows) == (128, 64)
    assert parse(argv(ROWS)).cached_rows == 128
    assert parse(argv(f"{ROWS} --embedding-cache-rows 70")).cached_rows == 70
    two = parse(argv(f"{ROWS} --tensor-model-parallel-size 2 --sequence-parallel"), world_size=2)
    assert (two.embedding_rows, two.cached_rows) == (128, 128)


def test_a_vocabulary_that_is_not_known_yet_is_asked_later() -> None:
    config = with_vocab_size(parse(argv(f"{ROWS} --embedding-cache-rows 64")), 0)
    assert cache_problem(config) is None and config.embedding_rows == 0
