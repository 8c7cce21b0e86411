"""Whoever builds a cache may be killed: what it has tokenised is kept, what nobody will ever use is removed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from megalite.data import file_chunks
from megalite.data.build import tokenise_corpus as tokens_of
from megalite.data.cache import cached_folder
from megalite.data.corpus import TextCorpus
from megalite.data.indexed import IndexedDataset
from megalite.data.tokenizer import ByteTokenizer

TEXTS = ["", "one\ntwo\n" * 9, "x", "three\nfour\nfive\n" * 7, "", "naïve\nsix\n" * 30]
WHOLE = (0.0, 1.0)


class Killed(BaseException):
    pass


class Counting(ByteTokenizer):
    """Counts what it encodes; is killed at the `deadly`-th batch."""

    def __init__(self, deadly: int = -1) -> None:
        super().__init__()
        self.batches, self.deadly = 0, deadly

    def encode_batch(self, texts):  # type: ignore[no-untyped-def]
        self.batches += 1
        if self.batches == self.deadly:
            raise Killed
        return super().encode_batch(texts)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_chunks, "UNIT_BYTES", 30)


def corpus(ends_documents: bool) -> TextCorpus:
    return TextCorpus("texts", lambda: "digest", lambda part, split: iter(TEXTS), ends_documents)


def documents(data: IndexedDataset) -> list[list[int]]:
    return [data.get(i).tolist() for i in range(len(data))]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("ends_documents", [True, False])
def test_a_killed_tokeniser_leaves_its_work_to_the_next(tmp_path: Path, ends_documents: bool) -> None:
    plain = ByteTokenizer()
    end = [plain.eod_id] if ends_documents else []
    expected = [[*text.encode(), *end] for text in TEXTS if text]
    fresh = Counting()
    assert documents(tokens_of(corpus(ends_documents), WHOLE, "train", fresh, tmp_path / "whole")) == expected
    for deadly in range(1, fresh.batches + 1, 3):
        folder, again = tmp_path / f"killed{deadly}", Counting()
        with pytest.raises(Killed):
            tokens_of(corpus(ends_documents), WHOLE, "train", Counting(deadly), folder)
        kept = list(folder.glob("tokens/*.partial/text_document.bin.partial"))
        if kept and deadly % 2:
            kept[-1].write_bytes(kept[-1].read_bytes()[:-9])  # torn
        assert documents(tokens_of(corpus(ends_documents), WHOLE, "train", again, folder)) == expected
        assert again.batches < fresh.batches or deadly < 5, "what was done is not done again"
        assert sorted(path.name for path in folder.glob("tokens/*/*")) == [
            "COMPLETE", "text_document.bin", "text_document.idx", "utf8_bytes"
        ]  # fmt: skip


def test_what_dead_builders_have_left_is_removed_and_a_live_ones_is_not(tmp_path: Path) -> None:
    for name in ("dead", "alive"):
        (tmp_path / f"{name}.tmp-x1").mkdir()
    (tmp_path / "recent.partial").mkdir()
    (tmp_path / "old.partial").mkdir()
    os.utime(tmp_path / "old.partial", (1, 1))
    with open(tmp_path / ".alive.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cached_folder(tmp_path, "new", lambda folder: np.save(folder / "x.npy", np.zeros(1)))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "alive.tmp-x1", "new", "recent.partial"
    ]  # fmt: skip


def test_a_system_without_locks_never_shares_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    stages = []
    cached_folder(tmp_path, "a", lambda folder: stages.append(folder.name), resumes=True)
    assert stages[0].startswith("a.tmp-")
