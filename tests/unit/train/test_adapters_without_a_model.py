"""Adapters of a run that resumes where nothing was saved yet: the model beside them would be random."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.comm import Axis
from megalite.config import parse
from megalite.errors import ConfigError
from megalite.train.run_directory import RunDirectory

TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 2 --tokenizer-type NullTokenizer --vocab-size 16"
)


@pytest.mark.parametrize("more", ["--auto-resume", "--load {save}"])
def test_the_start_refuses_what_the_flags_could_not_tell(more: str, tmp_path: Path) -> None:
    save = tmp_path / "run"
    flags = f"{TINY} --lora-rank 4 --save {save} {more.format(save=save)}"
    line = f"{save} holds no checkpoint, and the model beside the adapters would be random; add --load MODEL"
    with pytest.raises(ConfigError) as caught:
        RunDirectory(parse(flags.split()), Axis.single("world")).start()
    assert str(caught.value) == f"--lora-rank=4: {line}"
    assert RunDirectory(parse([*flags.split(), "--mock-data"]), Axis.single("world")).start() is None
