"""A run that continues reads the data that it began with, or says that it does not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from megalite.checkpoint.format import COMMITTED, MANIFEST, commit_text
from megalite.data.indexed import IndexedWriter
from pretrain_gpt import main

RUN = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 2 --lr 1e-2 "
    "--train-iters 4 --eval-iters 1 --split 8,2 --log-interval 1 --device cpu --num-workers 0 --no-exit-signal-handler"
).split()
REFUSED = (
    "not the data that the checkpoint was trained on, whose sample order it would continue; "
    "give it those, or continue with these (--allow-data-change)"
)


def write(prefix: Path, documents: int, first: int = 0) -> None:
    with IndexedWriter(prefix, vocab_size=64) as writer:
        for number in range(first, first + documents):
            writer.add_document(np.arange(number, number + 12) % 64)


def arguments(tmp_path: Path, name: str = "corpus", *more: str) -> list[str]:
    data = ["--data-path", str(tmp_path / name), "--data-cache-path", str(tmp_path / "cache")]
    null = [] if name.endswith(".txt") else ["--tokenizer-type", "NullTokenizer", "--vocab-size", "64"]
    return [*RUN, *data, *null, "--save", str(tmp_path / "run"), "--auto-resume", *more]


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    write(tmp_path / "corpus", 40)
    assert main(arguments(tmp_path, "corpus", "--exit-interval", "2")) == 0
    return tmp_path


def shrink(tmp_path: Path) -> None:
    write(tmp_path / "corpus", 30)


def append(tmp_path: Path) -> None:
    write(tmp_path / "corpus", 50)


def replace(tmp_path: Path) -> None:
    write(tmp_path / "corpus", 40, first=1)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (shrink, "30 documents of 360 tokens (checkpoint 40 documents of 480 tokens)"),
        (append, "50 documents of 600 tokens (checkpoint 40 documents of 480 tokens)"),
        (replace, "40 documents of 480 tokens as in the checkpoint, but other tokens"),
    ],
)
def test_changed_data_are_refused_with_the_numbers(change: Any, what: str, stopped: Path, capsys: Any) -> None:
    capsys.readouterr()
    change(stopped)
    assert main(arguments(stopped)) == 2
    assert capsys.readouterr().err == (f"error: --data-path={stopped}/corpus: {what}: {REFUSED}\n")
    assert main(arguments(stopped, "corpus", "--dry-run")) == 2
    assert what in capsys.readouterr().err
    assert main(arguments(stopped, "corpus", "--allow-data-change", "--exit-interval", "3")) == 0
    assert re.search(rf"\n +data +--data-path={stopped}/corpus: {re.escape(what)}\n", capsys.readouterr().out)
    assert main(arguments(stopped)) == 0, "what it continued with is now its data"


def test_another_tokenizer_of_as_many_ids_is_refused(tmp_path: Path, capsys: Any) -> None:
    """As one gets by training it again, on more text: the text is the same, and every id means something else."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over lazy dogs, and the lazy dogs sleep\n" * 60)

    def tokenizer(vocabulary: dict[str, int]) -> None:
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="the"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        backend.save(str(tmp_path / "tokenizer.json"))

    words = ["<|endoftext|>", *dict.fromkeys(re.findall(r"\w+|,", text.read_text()))]
    tokenizer({word: number for number, word in enumerate(words)})
    given = ["--tokenizer-model", str(tmp_path / "tokenizer.json")]
    assert main(arguments(tmp_path, "text.txt", *given, "--exit-interval", "2")) == 0
    tokenizer({word: number for number, word in enumerate([words[0], *reversed(words[1:])])})
    capsys.readouterr()
    for more in ([], ["--dry-run"]):
        assert main(arguments(tmp_path, "text.txt", *given, *more)) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: --tokenizer-model={tmp_path}/tokenizer.json: another tokenizer than the check")
        assert "--tokenizer-model " + str(tmp_path / "run" / "iter_0000002") in error and error.count("\n") == 1
    assert main(arguments(tmp_path, "text.txt", *given, "--allow-data-change", "--exit-interval", "3")) == 0
    assert re.search(r"\n data +tokenizer: .* -> another, ", capsys.readouterr().out)
    stored = tmp_path / "run" / "iter_0000003"
    assert main(arguments(tmp_path, "text.txt", "--tokenizer-model", str(stored), "--allow-data-change")) == 0


def test_the_same_data_elsewhere_are_the_same(stopped: Path, capsys: Any) -> None:
    for suffix in (".bin", ".idx"):
        shutil.move(stopped / f"corpus{suffix}", stopped / f"moved{suffix}")
    assert main(arguments(stopped, "moved")) == 0
    assert f"--data-path {stopped}/corpus -> {stopped}/moved" in capsys.readouterr().out


def test_another_raw_text_at_the_same_path_is_refused(tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one thing after the other, " * 40)
    assert main(arguments(tmp_path, "a.txt", "--exit-interval", "2")) == 0
    text.write_text("one thing after the other. " * 40)
    assert main(arguments(tmp_path, "a.txt")) == 2
    assert "1 document of 864 tokens as in the checkpoint, but other tokens" in capsys.readouterr().err


def test_only_weights_or_only_evaluation_may_read_anything(stopped: Path) -> None:
    shrink(stopped)
    load = ["--load", str(stopped / "run")]
    base = [word for word in arguments(stopped) if word != "--auto-resume"]
    assert main([*base, *load, "--skip-train"]) == 0
    assert main([*base[: base.index("--save")], *load, "--finetune"]) == 0


def test_a_checkpoint_that_says_nothing_of_its_data_is_taken(stopped: Path) -> None:
    (checkpoint,) = (stopped / "run").glob("iter_*")
    document = json.loads((checkpoint / MANIFEST).read_bytes())
    assert set(document["meta"].pop("data")) == {"train", "valid"}
    raw = json.dumps(document).encode()
    (checkpoint / MANIFEST).write_bytes(raw)
    (checkpoint / COMMITTED).write_bytes(commit_text(raw))
    shrink(stopped)
    assert main(arguments(stopped)) == 0
