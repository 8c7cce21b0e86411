"""A Hugging Face model that is trained with another tokenizer's ids says so at the start."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.comm import World
from megalite.config import parse
from megalite.train import offer_of
from megalite.train.run import open_run
from tests.unit.convert.chat_model import save_model, save_tokenizer

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    save_tokenizer(folder)
    return folder


def swapped(definition: Any) -> None:
    """The same pieces by other ids."""
    vocab = definition["model"]["vocab"]
    vocab["e"], vocab["o"] = vocab["o"], vocab["e"]


def other_template(definition: Any) -> None:
    """Another file, the same ids."""
    definition["post_processor"] = None


CASES: dict[str, tuple[Callable[[Any], None] | None, list[str], bool]] = {
    "the model's own": (None, [], False),
    "another file of the same ids": (other_template, [], False),
    "other ids": (swapped, [], True),
    "bytes": (None, ["--tokenizer-type", "ByteTokenizer"], True),
}


@pytest.mark.parametrize("case", CASES)
def test_other_ids_are_told(case: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    change, flags, told = CASES[case]
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over lazy dogs\n" * 40)
    if change is not None:
        definition = json.loads((model / "tokenizer.json").read_text())
        change(definition)
        (tmp_path / "tokenizer.json").write_text(json.dumps(definition, indent=3))
        flags = ["--tokenizer-model", str(tmp_path)]
    argv = ["--load", str(model), "--use-checkpoint-args", "--data-path", str(tmp_path / "text.txt"), *flags]
    argv += "--seq-length 16 --micro-batch-size 1 --lr 1e-3 --train-iters 1 --split 1,0,0 --eval-iters 0".split()
    with caplog.at_level(logging.WARNING), open_run(parse(argv, read_offer=offer_of), World()):
        pass
    line = f"`load`={model}: its own tokenizer gives a text other ids than the one of this run ("
    assert sum(record.getMessage().startswith(line) for record in caplog.records) == told
