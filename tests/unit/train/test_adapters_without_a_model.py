"""Adapters of a run that resumes where nothing was saved yet: the model beside them is random."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megalite.comm import Axis
from megalite.config import parse
from megalite.train.run_directory import RunDirectory

TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 16"
)


@pytest.mark.parametrize(("more", "told"), [("--auto-resume", True), ("--load {save}", True), ("", False)])
def test_the_start_says_what_the_flags_could_not_tell(
    more: str, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save = tmp_path / "run"
    flags = f"{TINY} --lora-rank 4 --save {save} {more.format(save=save)}"
    with caplog.at_level(logging.WARNING):
        assert RunDirectory(parse(flags.split()), Axis.single("world")).start() is None
    lines = [record.getMessage() for record in caplog.records if "--lora-rank" in record.getMessage()]
    line = f"--lora-rank=4: {save} holds no checkpoint, and the model beside the adapters is random; add --load MODEL"
    assert lines == [line] * told  # without either flag the parser has said it
