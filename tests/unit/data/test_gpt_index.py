"""Megatron's sample order: against a walk token by token, and against numbers that Megatron's own helper gave."""

from __future__ import annotations

import numpy as np
import pytest

from megalite.data import gpt_index
from megalite.data.gpt_index import build_order, build_sample_index, num_epochs_for, separate_final_epoch


def walk(lengths: list[int], document_index: list[int], seq_length: int) -> list[tuple[int, int]]:
    """The place of every S-th token of the stream, by counting."""
    places = [(place, offset) for place, doc in enumerate(document_index) for offset in range(lengths[doc])]
    rows = [places[k * seq_length] for k in range((len(places) - 1) // seq_length + 1)]
    return [(0, 0), *rows[1:]]


def test_sample_index_equals_a_walk_over_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.RandomState(3)
    for _ in range(400):
        lengths = random.randint(random.randint(2), random.choice([3, 12, 60]), random.randint(1, 30)).astype(np.int32)
        documents = np.tile(np.arange(len(lengths), dtype=np.int32), random.randint(1, 4))
        random.shuffle(documents)
        seq_length = int(random.randint(1, 15))
        if lengths[documents].sum() < 2:
            continue
        monkeypatch.setattr(gpt_index, "BLOCK", int(random.randint(1, 50)))
        rows = build_sample_index(lengths, documents, seq_length)
        assert rows.dtype == np.int32
        assert [tuple(row) for row in rows.tolist()] == walk(lengths.tolist(), documents.tolist(), seq_length)


def test_wide_positions_give_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of more than 2^31 tokens, and streams of more than 2^31 documents, take 64 bits: with a small
    bound here.
    """
    lengths = np.array([5, 0, 9, 4, 1, 30], np.int32)
    documents = np.array([3, 5, 0, 1, 2, 4] * 3, np.int32)
    expected = build_sample_index(lengths, documents, 4)
    monkeypatch.setattr(gpt_index, "INT32_MAX", 60)
    in_blocks = build_sample_index(lengths, documents, 4)
    monkeypatch.setattr(gpt_index, "INT32_MAX", 8)
    by_search = build_sample_index(lengths, documents, 4)
    assert in_blocks.tolist() == by_search.tolist() == expected.tolist()
    assert by_search.dtype == np.int64


def test_an_unaligned_index_of_a_file_is_fine() -> None:
    raw = bytes(2) + np.array([3, 1, 4, 1, 5], np.int32).tobytes()
    lengths = np.frombuffer(raw, np.int32, 5, 2)
    assert not lengths.flags.aligned
    rows = build_sample_index(lengths, np.array([2, 0, 4, 1, 3], np.int32), 3)
    assert rows.tolist() == [[0, 0], [0, 3], [1, 2], [2, 2], [3, 0]]  # from Megatron's helper


def test_a_whole_order_equals_megatrons() -> None:
    """Recorded from Megatron's code: 5 epochs are not enough for 0.8 of the last, which is therefore shuffled apart."""
    order = build_order(np.array([5, 3, 0, 9, 1, 4], np.int32), 0, 6, seq_length=4, num_samples=13, seed=1234)
    assert order.document_index.tolist() == [1, 2, 5, 2, 3, 4, 1, 0, 4, 5, 0, 3, 1, 0, 3, 2, 5, 4]
    assert order.sample_index.tolist() == [
        [0, 0], [2, 1], [4, 1], [4, 5], [5, 0], [7, 0], [7, 4], [9, 2], [10, 2],
        [11, 1], [11, 5], [12, 0], [13, 1], [14, 0], [14, 4], [14, 8], [16, 3],
    ]  # fmt: skip
    assert order.shuffle_index.tolist() == [7, 6, 2, 3, 1, 9, 5, 4, 0, 8, 15, 11, 14, 13, 10, 12]
    assert (order.document_index.dtype, order.sample_index.dtype, order.shuffle_index.dtype) == (
        np.int32,
        np.int32,
        np.uint32,
    )


def test_epochs_are_as_few_as_hold_the_samples() -> None:
    for tokens in range(1, 30):
        for seq_length in range(1, 8):
            for samples in range(1, 20):
                epochs = 1
                while epochs * tokens < samples * seq_length + 1:
                    epochs += 1
                assert num_epochs_for(tokens, seq_length, samples) == epochs
    assert num_epochs_for(7, 3, None) == 1


def test_a_mostly_unused_last_epoch_is_shuffled_apart() -> None:
    # 100 tokens, S = 1: 99 samples an epoch, 199 in two. 0.8 * 99 = 79.2 decides.
    assert separate_final_epoch(100, 1, 99 + 78, 2) == (True, 99)
    assert separate_final_epoch(100, 1, 99 + 79, 2) == (False, 99)
    assert separate_final_epoch(100, 1, 50, 1) == (False, 0)
    apart = build_order(np.full(100, 1, np.int32), 0, 100, seq_length=1, num_samples=99 + 30, seed=5)
    assert sorted(apart.shuffle_index[:99].tolist()) == list(range(99))
    assert sorted(apart.document_index[:100].tolist()) == list(range(100))


def test_every_sample_is_drawn_once() -> None:
    order = build_order(np.array([40, 7, 13], np.int32), 1, 3, seq_length=4, num_samples=11, seed=1)
    samples = len(order.shuffle_index)
    assert sorted(order.shuffle_index.tolist()) == list(range(samples)) and samples >= 11
    assert set(order.document_index.tolist()) == {1, 2}
