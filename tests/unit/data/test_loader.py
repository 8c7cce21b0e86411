"""Micro-batches: the same samples at every layout, batch size and number of threads; masks against a
token-by-token rule.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from data_inputs import tokens_of, write_documents

from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed import IndexedDataset, IndexedWriter
from megalite.data.loader import BatchLoader, DocumentMasks, make_microbatch
from megalite.errors import DataError
from megalite.microbatch import Microbatch

EOD = 299


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> GPTDataset:
    random = np.random.RandomState(0)
    documents = [[*random.randint(0, EOD, n).tolist(), EOD] for n in random.randint(1, 40, 30)]
    store = IndexedDataset(write_documents(tmp_path_factory.mktemp("loader") / "a", documents))
    return GPTDataset(store, 0, 30, seq_length=8, requests=[100], seed=1)


def rows(batches: list[Microbatch]) -> dict[int, list[int]]:
    """Tokens by sample number."""
    return {int(n): t for batch in batches for n, t in zip(batch.sample_ids, batch.tokens.tolist(), strict=True)}


@pytest.mark.parametrize("workers", [0, 2])
def test_every_layout_reads_the_same_samples(dataset: GPTDataset, workers: int) -> None:
    expected = {k: tokens_of(dataset, k)[:-1] for k in range(8, 32)}
    for dp_size, micro in ((1, 8), (1, 1), (2, 2), (4, 2), (2, 4)):
        seen: dict[int, list[int]] = {}
        for rank in range(dp_size):
            options = {"micro_batch_size": micro, "dp_rank": rank, "dp_size": dp_size, "num_workers": workers}
            with BatchLoader(dataset, consumed_samples=8, **options) as loader:
                batches = [batch for size in (8, 16) for batch in loader.next_batch(size)]
                assert loader.consumed_samples == 32
            assert all(batch.shape == (micro, 8) for batch in batches)
            assert not seen.keys() & rows(batches).keys()
            seen |= rows(batches)
        assert seen == expected


def test_labels_are_tokens_moved_by_one(dataset: GPTDataset) -> None:
    with BatchLoader(dataset, consumed_samples=0, micro_batch_size=2, dp_rank=0, dp_size=1) as loader:
        (batch,) = loader.next_batch(2)
    for row in range(2):
        assert [*batch.tokens[row].tolist(), int(batch.labels[row, -1])] == tokens_of(dataset, row)
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.positions.tolist() == [list(range(8))] * 2 and bool((batch.loss_mask == 1).all())
    assert batch.document_starts is None
    assert {t.dtype for t in (batch.tokens, batch.labels, batch.positions, batch.sample_ids)} == {torch.int64}


def test_a_global_batch_is_a_whole_number_of_micro_steps(dataset: GPTDataset) -> None:
    with BatchLoader(dataset, consumed_samples=0, micro_batch_size=2, dp_rank=0, dp_size=3) as loader:
        assert len(loader.next_batch(12)) == 2
        with pytest.raises(AssertionError, match="refuses 10 samples in steps of 6"):
            loader.next_batch(10)


def test_threads_follow_a_changing_batch_size_and_a_jump(dataset: GPTDataset) -> None:
    with BatchLoader(dataset, consumed_samples=0, micro_batch_size=2, dp_rank=1, dp_size=2, num_workers=2) as loader:
        first = rows(loader.next_batch(4))
        loader.skip(8)
        second = rows(loader.next_batch(12))
    assert list(first) == [2, 3] and list(second) == [14, 15, 18, 19, 22, 23]
    assert all(tokens == tokens_of(dataset, n)[:-1] for n, tokens in (first | second).items())
    assert not [t for t in threading.enumerate() if t.name.startswith("megalite-data")]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_peeked_at_is_still_to_come(dataset: GPTDataset, workers: int) -> None:
    total = len(dataset)
    options = {"micro_batch_size": 2, "dp_rank": 1, "dp_size": 2, "num_workers": workers}
    with BatchLoader(dataset, consumed_samples=total - 28, pieces=lambda consumed: 2, **options) as loader:
        ahead = loader.peek(3)
        read = loader.next_batch(4) + loader.next_batch(8)
        assert [batch.sample_ids.tolist() for batch in ahead] == [batch.sample_ids.tolist() for batch in read]
        assert all(torch.equal(a.tokens, b.tokens) and a.shape == (4, 4) for a, b in zip(ahead, read, strict=True))
        loader.peek(3)
        loader.skip(8)
        assert [int(batch.sample_ids[0]) for batch in loader.peek(9)] == [total - 6, total - 2]
        assert [int(batch.sample_ids[0]) for batch in loader.next_batch(8)] == [total - 6, total - 2]
        assert loader.peek(1) == [] and loader.consumed_samples == total


def test_the_end_of_the_samples_is_named(dataset: GPTDataset) -> None:
    total = len(dataset)
    with BatchLoader(
        dataset, consumed_samples=total - 2, micro_batch_size=2, dp_rank=0, dp_size=1, num_workers=1
    ) as loader:
        loader.next_batch(2)
        with pytest.raises(DataError, match=rf"no samples left to consume \({total} consumed, {total} in all"):
            loader.next_batch(2)


@pytest.mark.parametrize(
    "masks", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]
)
def test_masks_follow_documents(masks: tuple[bool, bool, bool]) -> None:
    positions, attention, loss = masks
    random = np.random.RandomState(2)
    text = random.choice([1, 2, 3, EOD], (6, 17))
    masks_given = DocumentMasks(
        eod_id=EOD, reset_position_ids=positions, reset_attention_mask=attention, eod_mask_loss=loss
    )
    batch = make_microbatch(text, np.full(6, 17), np.arange(6), masks_given)
    for row in range(6):
        begin = place = 0
        for column in range(16):
            is_end = text[row, column] == EOD
            assert batch.positions[row, column] == (place if positions else column)
            assert batch.loss_mask[row, column] == (0 if loss and is_end else 1)
            if attention:
                assert batch.document_starts is not None and batch.document_starts[row, column] == begin
            place += 1
            if is_end:
                begin, place = column + 1, 0
    assert attention or batch.document_starts is None


def test_masks_need_an_end_of_document() -> None:
    for flag in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        with pytest.raises(DataError, match=f"^--{flag.replace('_', '-')}: the tokenizer has no end-of-document token"):
            DocumentMasks(**{flag: True})


@pytest.mark.parametrize("dp_size", [1, 3])
def test_a_full_pass_counts_every_label_once(dataset: GPTDataset, dp_size: int) -> None:
    source = dataset.sequential()
    stream = np.concatenate([dataset.store.get(i) for i in range(30)]).tolist()
    assert len(source) == -(-(len(stream) - 1) // 8)
    found: dict[int, tuple[list[int], list[int]]] = {}
    for rank in range(dp_size):
        loader = BatchLoader(source, consumed_samples=0, micro_batch_size=2, dp_rank=rank, dp_size=dp_size)
        for batches in loader.full_pass(2 * dp_size):
            for batch in batches:
                for n, tokens, labels, mask in zip(
                    batch.sample_ids, batch.tokens, batch.labels, batch.loss_mask, strict=True
                ):
                    weighed = mask.bool()
                    found[int(n)] = tokens[weighed].tolist(), labels[weighed].tolist()
    assert [t for n in sorted(found) for t in found[n][0]] == stream[:-1]
    assert [t for n in sorted(found) for t in found[n][1]] == stream[1:]


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    store = IndexedDataset(write_documents(tmp_path / "a", [[1, 2, 50, 3]]))
    data = GPTDataset(store, 0, 1, seq_length=2, requests=[1], seed=0, vocab_size=50)
    with pytest.raises(DataError, match=r"holds token id 50, outside of the vocabulary of the tokenizer \(0..49\)"):
        for k in range(len(data)):
            tokens_of(data, k)


@pytest.mark.parametrize("requests", [[9], [60], [9, 60], [None]])
def test_documents_that_samples_cut_are_counted(tmp_path: Path, requests: list[int | None]) -> None:
    """Against a walk over the stream of tokens: sample k has those from k S to k S + S, the last as a label."""
    rng = np.random.default_rng(7)
    with IndexedWriter(tmp_path / "a", vocab_size=50) as writer:
        for length in rng.integers(1, 20, 30):
            writer.add_document(rng.integers(0, 50, length))
    data = GPTDataset(IndexedDataset(tmp_path / "a"), 0, 30, seq_length=8, requests=requests, seed=1)
    cut = number = 0
    for order in data._segments:
        at, ends = 0, {8 * k for k in range(1, len(order.sample_index) - 1)}
        for document in order.document_index:
            length = int(data.store.lengths[document])
            cut += any(at < end < at + length - 1 for end in ends)
            at, number = at + length, number + 1
    assert data.documents_cut() == (cut, number) and 0 < cut < number
