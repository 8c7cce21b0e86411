"""Checkpoints whose checksums are right and whose words are not: one line, and no more memory than the files hold."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.format import COMMITTED, MANIFEST, StoredTensor, checksum, commit_text, structure_hash
from megalite.data.tokenizer_io import DESCRIPTION_FILE
from megalite.errors import MegaliteError
from megalite.inference.loaded_model import load_for_inference
from megalite.nn.kv_cache import LayerCache
from pretrain_gpt import main

RUN = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --lr 1e-2 "
    "--train-iters 4 --eval-iters 0 --device cpu --num-workers 0 --mock-data --tokenizer-type ByteTokenizer "
    "--no-exit-signal-handler"
).split()
BAD = [None, -1, 0, 2**40, 2**62, 10**400, 1e308, "x", "", [], {}, [[[]]], True, 1.5, float("nan"), {"a": {}}, [1, 2]]
GONE = object()
Place = tuple[str | int, ...]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("run")
    assert main([*RUN, "--save", str(save), "--exit-interval", "2"]) == 0
    return next(save.glob("iter_*"))


def places(document: Any, at: Place = ()) -> Iterator[Place]:
    if at:
        yield at
    entries: Any = document.items() if isinstance(document, dict) else ()
    for key, value in enumerate(document[:1]) if isinstance(document, list) else entries:
        yield from places(value, (*at, key))


def changed(document: dict[str, Any], at: Place, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(document)
    inner: Any = document
    for key in at[:-1]:
        inner = inner[key]
    if value is GONE:
        inner.pop(at[-1])
    else:
        inner[at[-1]] = value
    try:
        tensors = {name: StoredTensor(t["dtype"], tuple(t["shape"])) for name, t in document["tensors"].items()}
        document["structure"] = structure_hash(tensors)
    except (TypeError, KeyError, AttributeError):
        pass
    return document


def commit(document: dict[str, Any], original: Path, folder: Path) -> Path:
    target = folder / "victim"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(original, target)
    raw = json.dumps(document).encode()
    (target / MANIFEST).write_bytes(raw)
    (target / COMMITTED).write_bytes(commit_text(raw))
    return target


def test_every_field_may_lie(original: Path, tmp_path: Path, full: bool, landing: bool, capsys: Any) -> None:
    """Wrong in type, sign, size or nesting, or not there: taken, or refused in one line, by a model and by a run."""
    document = json.loads((original / MANIFEST).read_bytes())
    rng, everywhere = random.Random(3), list(places(document))
    for at in everywhere if full else rng.sample(everywhere, 120 if landing else 40):
        value = rng.choice([*BAD, GONE])
        victim = commit(changed(document, at, value), original, tmp_path)
        try:
            load_for_inference(victim)
        except MegaliteError as error:
            assert len(str(error)) < 2000, at
        except Exception as error:
            raise AssertionError(f"{at} = {value!r}: {type(error).__name__}: {error}") from error
        if at[0] == "meta":
            capsys.readouterr()
            assert main([*RUN, "--load", str(victim)]) in (0, 2), f"{at} = {value!r}"
            assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (
            ("meta", "config", "model", "hidden_size"),
            2**20,
            r"word_embeddings.weight is \[257, 1048576\] by its config",
        ),
        (("meta", "config", "model", "num_layers"), 9999, "tensors cannot be 9999 layers"),
        (("meta", "config", "model", "vocab_size"), None, "a vocabulary of None|expected a value"),
        (("meta", "config", "model"), 3, "model is '3', not a section"),
        (("meta", "config", "model", "norm_epsilon"), 10**400, "expected float"),
        (("tensors", "head.final_norm.weight", "dtype"), [], "dtype"),
        (("meta", "iteration"), None, "iteration is None, not a whole number >= 0; the checkpoint is damaged"),
    ],
)
def test_what_is_asked_for_is_bounded_by_what_is_there(
    at: Place, value: Any, words: str, original: Path, tmp_path: Path
) -> None:
    document = json.loads((original / MANIFEST).read_bytes())
    with pytest.raises(MegaliteError, match=words) as caught:
        load_for_inference(commit(changed(document, at, value), original, tmp_path))
    assert "\n" not in str(caught.value)


def test_padding_is_not_allocated(original: Path, tmp_path: Path) -> None:
    document = json.loads((original / MANIFEST).read_bytes())
    at: Place = ("meta", "config", "model", "make_vocab_size_divisible_by")
    loaded = load_for_inference(commit(changed(document, at, 2**40), original, tmp_path))
    assert sum(p.numel() for p in loaded.model.parameters()) < 10_000


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"\xff", b"", b"[]", b"{}", b'{"tokenizer_type": 3, "vocab_size": 257}', b"null",
                b'{"tokenizer_type": "ByteTokenizer", "vocab_size": Infinity}'],
)  # fmt: skip
def test_a_tokenizer_that_is_none_is_one_line(content: bytes, original: Path, tmp_path: Path, capsys: Any) -> None:
    document = json.loads((original / MANIFEST).read_bytes())
    document["extra_files"][DESCRIPTION_FILE] = {"bytes": len(content), "checksum": checksum(content)}
    victim = commit(document, original, tmp_path)
    (victim / DESCRIPTION_FILE).write_bytes(content)
    with pytest.raises(MegaliteError, match="not a tokenizer description"):
        load_for_inference(victim)
    capsys.readouterr()
    assert main([*RUN[8:], "--load", str(victim), "--use-checkpoint-args"]) == 2
    assert "not a tokenizer description" in capsys.readouterr().err


def test_a_cache_grows_with_what_is_seen() -> None:
    cache = LayerCache(2**40)
    rows = torch.randn(70, 1, 2, 4)
    for at in range(0, 70, 7):
        keys, values = cache.append(rows[at : at + 7], -rows[at : at + 7])
    assert torch.equal(keys, rows) and torch.equal(values, -rows)
    with pytest.raises(ValueError, match="5 do not fit"):
        LayerCache(4).append(rows[:5], rows[:5])


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (("meta", "progress", "consumed_samples"), -1, "progress: consumed_samples is -1, not a whole number"),
        (("meta", "progress"), None, "progress: is not an object"),
        (("meta", "train_requests"), [2**40], "--train-iters: the order of 1,099,511,627,776 train samples"),
        (("meta", "train_requests"), "x", "train_requests is x, not a list of whole numbers"),
        (("meta", "opt_param_scheduler", "learning_rate", "style"), "x", "style is x, not one of constant, linear"),
        (("meta", "loss_scaler"), {"scale": -1, "good_steps": 0, "tolerance": 1}, "scale is -1, not above 0"),
        (("meta", "data", "train", 0, "tokens"), None, "account of its data is damaged"),
    ],
)
def test_a_run_does_not_go_on_from_nonsense(
    at: Place, value: Any, words: str, original: Path, tmp_path: Path, capsys: Any
) -> None:
    document = json.loads((original / MANIFEST).read_bytes())
    victim = commit(changed(document, at, value), original, tmp_path)
    capsys.readouterr()
    assert main([*RUN, "--load", str(victim), "--override-opt-param-scheduler"]) == 2
    assert words in capsys.readouterr().err
