"""A pair of one tokenizer is not read by another."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import pytest
from data_inputs import config, write_documents

import merge_datasets
from megalite.convert.hf_tokenizer import huggingface_files
from megalite.data import build_datasets, make_tokenizer
from megalite.data.preprocess import preprocess
from megalite.data.remote_tokens import RemoteIndexedDataset
from megalite.data.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer
from megalite.data.written_by import check_tokenizer
from megalite.errors import DataError
from megalite.stores import StoreUrl, place
from tokenizer_training import train_bpe

WORDS = "the quick brown fox jumps over the lazy dog"


def folder(where: Path, definition: bytes, **config: object) -> Tokenizer:
    where.mkdir()
    (where / "tokenizer.json").write_bytes(definition)
    (where / "tokenizer_config.json").write_text(json.dumps(config))
    return make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(where))


def pair(where: Path, tokenizer: Tokenizer) -> str:
    text = where.parent / "text.jsonl"
    text.write_text(json.dumps({"text": WORDS}) + "\n")
    (prefix,) = preprocess([str(text)], str(where), tokenizer).prefixes
    return prefix


def open_as(prefix: str, tokenizer: Tokenizer) -> None:
    cfg = config(data_path=(prefix,), split="1,0,0")
    sizes = {"train_samples": 2, "valid_samples": 0, "test_samples": 0, "seed": 1, "cache_dir": None}
    build_datasets(cfg, seq_length=4, tokenizer=tokenizer, **sizes)


def test_only_the_tokenizer_that_wrote_a_pair_reads_it(tmp_path: Path) -> None:
    one, other = (train_bpe([text] * 9, 262).files()["tokenizer.json"] for text in (WORDS, WORDS[::-1]))
    wrote = folder(tmp_path / "a", one, chat_template="x")
    prefix, of_bytes = pair(tmp_path / "hf", wrote), pair(tmp_path / "bytes", ByteTokenizer())
    shutil.move(tmp_path / "a", tmp_path / "moved")
    open_as(prefix, make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "moved")))
    open_as(prefix, folder(tmp_path / "b", one, chat_template="y"))
    open_as(of_bytes, ByteTokenizer())
    (tmp_path / "same ids").mkdir()
    for name, content in huggingface_files(ByteTokenizer()).items():
        (tmp_path / "same ids" / name).write_bytes(content)
    open_as(of_bytes, make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "same ids")))
    open_as(of_bytes, NullTokenizer(300))
    for path, reader, says in (
        (of_bytes, wrote, r"tokenised by ByteTokenizer \(257 ids.*this run has HuggingFaceTokenizer \(262 ids"),
        (prefix, ByteTokenizer(), r"tokenised by HuggingFaceTokenizer \(262 ids.*this run has ByteTokenizer"),
        (prefix, folder(tmp_path / "c", other), r"tokenised by another HuggingFaceTokenizer"),
        (prefix, folder(tmp_path / "d", one, eos_token="a"), r"tokenised by another HuggingFaceTokenizer"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=f"^--data-path={path}: {says}.*tools/preprocess_data.py again"):
            open_as(path, reader)
    Path(of_bytes + ".tokenizer.json").unlink()  # as Megatron's have none
    open_as(of_bytes, wrote)
    Path(of_bytes + ".tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="not a tokenizer description"):
        open_as(of_bytes, wrote)


def test_joined_pairs_keep_the_name_that_all_of_them_have(tmp_path: Path) -> None:
    of_bytes, again = pair(tmp_path / "a", ByteTokenizer()), pair(tmp_path / "b", ByteTokenizer())
    other = pair(tmp_path / "c", train_bpe([WORDS] * 9, 262))
    out, named = str(tmp_path / "out"), tmp_path / "out.tokenizer.json"
    merge_datasets.main(["--input", of_bytes, again, "--output-prefix", out])
    assert named.read_text() == Path(of_bytes + ".tokenizer.json").read_text()
    merge_datasets.main(["--input", of_bytes, write_documents(tmp_path / "unnamed", [[1]]), "--output-prefix", out])
    assert not named.exists(), "the name of the older pair is no longer true"
    with pytest.raises(DataError, match=f"^--input={other}: another tokenizer wrote it than {of_bytes}"):
        merge_datasets.main(["--input", of_bytes, other, "--output-prefix", out])


def test_a_store_is_asked_once_for_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec", reason="stores are not tested: fsspec is not installed")
    prefix, url = pair(tmp_path / "c", ByteTokenizer()), place(f"memory://{uuid.uuid4().hex}/c")
    assert isinstance(url, StoreUrl)
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        (url.parent / f"c{suffix}").write_bytes(Path(prefix + suffix).read_bytes())
        if suffix != ".tokenizer.json":
            (url.parent / f"d{suffix}").write_bytes(Path(prefix + suffix).read_bytes())
    named, unnamed = (RemoteIndexedDataset(str(url.parent / n), tmp_path / "cache", 1) for n in "cd")
    asked: list[str] = []
    for name in ("_read", "_head"):
        original = getattr(type(url.store), name)
        monkeypatch.setattr(
            type(url.store), name, lambda self, key, *more, of=original: asked.append(key) or of(self, key, *more)
        )
    with pytest.raises(DataError, match="tokenised by ByteTokenizer"):
        check_tokenizer(named, train_bpe([WORDS] * 9, 262), "it")
    check_tokenizer(unnamed, train_bpe([WORDS] * 9, 262), "it")
    assert asked == ["c.tokenizer.json", "d.tokenizer.json"]
