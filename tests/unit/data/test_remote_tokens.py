"""Tokens in a store: the batches of the same files on a disk, by the ranges that were announced and no others."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.data.gpt_dataset import GPTDataset, SampleSource
from megalite.data.indexed import IndexedDataset, IndexedWriter
from megalite.data.loader import BatchLoader
from megalite.data.remote_tokens import RemoteIndexedDataset
from megalite.errors import DataError
from megalite.stores import StoreUrl, place

pytest.importorskip("fsspec", reason="stores are not tested: fsspec is not installed")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[IndexedDataset, RemoteIndexedDataset]:
    """The same documents on a disk and in a store."""
    rng = np.random.default_rng(3)
    with IndexedWriter(tmp_path / "c", vocab_size=1000) as writer:
        for length in rng.integers(0, 90, 60):
            writer.add_document(rng.integers(0, 1000, length))
    url = place(f"memory://{uuid.uuid4().hex}/corpus/c")
    assert isinstance(url, StoreUrl)
    for suffix in (".bin", ".idx"):
        (url.parent / f"c{suffix}").write_bytes((tmp_path / f"c{suffix}").read_bytes())
    return IndexedDataset(tmp_path / "c"), RemoteIndexedDataset(str(url), tmp_path / "cache", 4)


def batches(source: SampleSource, workers: int, rank: int) -> list[torch.Tensor]:
    sizes = {"micro_batch_size": 2, "dp_rank": rank, "dp_size": 2, "consumed_samples": 4}
    with BatchLoader(source, num_workers=workers, **sizes) as loader:
        loader.next_batch(8)
        loader.skip(4)
        loader.peek(1)
        return [mb.tokens for _ in range(3) for mb in loader.next_batch(8)]


@pytest.mark.parametrize(("workers", "rank"), [(0, 0), (2, 1)])
def test_batches_are_those_of_a_disk(
    pair: tuple[IndexedDataset, RemoteIndexedDataset], monkeypatch: pytest.MonkeyPatch, workers: int, rank: int
) -> None:
    here, there = pair
    read: Counter[str] = Counter()
    url = place(f"{there.prefix}.bin")
    assert isinstance(url, StoreUrl)
    original = type(url.store)._read

    def counted(self: object, name: str, start: int, stop: int | None) -> object:
        read[threading.current_thread().name.partition("_")[0]] += 1
        return original(self, name, start, stop)  # type: ignore[arg-type]  # the store's own method

    monkeypatch.setattr(type(url.store), "_read", counted)
    cut = {"seq_length": 30, "requests": (120,), "seed": 5}  # some epochs
    one, other = (batches(GPTDataset(store, 0, len(store), **cut), workers, rank) for store in (here, there))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) and len(one) == 6
    assert read.keys() == {"tokens"}, "nothing was read that was not announced"
    assert read["tokens"] < 120, "this rank's ranges, as far as it reads"


def test_whole_passes_and_samples_of_the_survey(pair: tuple[IndexedDataset, RemoteIndexedDataset]) -> None:
    here, there = pair
    assert all(np.array_equal(a, b) for a, b in zip(here.chunks(64), there.chunks(64), strict=True))
    assert np.array_equal(here.stream(100, 700), there.stream(100, 700))
    one, other = (GPTDataset(s, 0, len(s), seq_length=30, requests=(None,), seed=5).sequential() for s in pair)
    a, b = np.empty(31, np.int64), np.empty(31, np.int64)
    other.expect(range(5))
    for sample in range(len(one)):
        assert one.read(sample, a) == other.read(sample, b) and np.array_equal(a, b)


def test_neighbours_are_one_request(pair: tuple[IndexedDataset, RemoteIndexedDataset]) -> None:
    there = pair[1]
    asked: list[tuple[int, int]] = []
    submit = there._remote.ahead._pool.submit
    there._remote.ahead._pool.submit = lambda read, key, a, b: (asked.append((a, b)), submit(read, key, a, b))[1]  # type: ignore
    there.expect([(5, 0, 3), (6, 0, 2), (5, 3, 7)])
    assert len(asked) == 1
    assert np.array_equal(there.get(5, 3, 7), pair[0].get(5, 3, 7))
    assert len(there._remote.ahead._coming) == 2, "what was read is forgotten"


def test_an_index_is_fetched_once_and_anew_where_it_changed(tmp_path: Path) -> None:
    url = place(f"memory://{uuid.uuid4().hex}/c")
    assert isinstance(url, StoreUrl)
    for length in (5, 9):
        with IndexedWriter(tmp_path / f"c{length}", vocab_size=1000) as writer:
            writer.add_document(np.arange(length))
        for suffix in (".bin", ".idx"):
            (url.parent / f"c{suffix}").write_bytes((tmp_path / f"c{length}{suffix}").read_bytes())
        for _ in range(2):
            there = RemoteIndexedDataset(str(url), tmp_path / "cache", 4)
            assert there.lengths.tolist() == [length]
    assert len(list((tmp_path / "cache").glob("*/COMPLETE"))) == 2
    with pytest.raises(DataError, match=r"--data-path=memory://\w+/d: .* not found"):
        RemoteIndexedDataset(f"memory://{url.bucket}/d", tmp_path, 1)
