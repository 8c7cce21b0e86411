"""What a run writes into its directory leads nowhere else: a link would be followed, a pipe would be waited for."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from megalite.comm import Axis
from megalite.config import parse
from megalite.errors import CheckpointError
from megalite.train.dry_run import dry_run
from megalite.train.run_directory import RunDirectory

TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 16"
)
FILES = ("metrics.jsonl", "samples.jsonl", "config.yaml", "COMPLETED", "latest_checkpointed_iteration.txt")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["a link", "a link to nothing", "a link to a directory", "a pipe", "a directory"])
def test_what_is_in_the_way_is_named_and_left_alone(name: str, kind: str, tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.write_text("mine\n")
    if kind == "a pipe":
        os.mkfifo(run / name)
    elif kind == "a directory":
        (run / name).mkdir()
    else:
        (run / name).symlink_to({"a link": outside, "a link to nothing": tmp_path / "none"}.get(kind, tmp_path))
    kind = kind.removesuffix(" to nothing").removesuffix(" to a directory")
    config = parse([*shlex.split(TINY), "--save", str(run)])
    begin = f"--save={run}: {name} is {kind}"
    with (
        pytest.raises(CheckpointError) as caught,
        RunDirectory(config, Axis.single("world")),
    ):
        pass
    with pytest.raises(CheckpointError) as dry:
        dry_run(config, {}, 1)
    for error in (caught, dry):
        assert str(error.value).startswith(begin) and str(error.value).endswith("; move it away")
    assert outside.read_text() == "mine\n" and not (tmp_path / "none").exists()


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with RunDirectory(parse([*shlex.split(TINY), "--save", str(tmp_path / "run")]), Axis.single("world")):
        assert [*(tmp_path / "disk").iterdir()]  # its lock
