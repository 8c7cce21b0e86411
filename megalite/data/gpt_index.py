"""Which tokens are sample number k: Megatron's order, bit for bit, as pure functions of (lengths, seed, length,
number of samples).

The documents of a split are repeated for as many epochs as the run needs and shuffled into one long stream; the
stream is cut every S tokens; the cuts are shuffled again::

    document_index   d7 d2 d9 ...          order of the documents in the stream      int32  [E * documents]
    sample_index     |----|----|----       where each sample begins: (position in    int32  [n + 1, 2]
                      S    S    S          document_index, offset in that document)
    shuffle_index    4 0 2 ...             sample k of the run is cut number 4       uint32 [n]

A sample has S + 1 tokens: its last one is the first of the next cut, for the labels are the inputs moved by one.
The random stream is `numpy.random.RandomState(seed)`, used first for document_index, then for shuffle_index.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["SampleOrder", "build_order", "build_sample_index", "num_epochs_for", "separate_final_epoch"]

# The last epoch is shuffled apart from the others where less than this part of it is used.
FINAL_EPOCH_SHARE = 0.80
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class SampleOrder:
    """The three arrays of the picture above, and `num_epochs` = E."""

    document_index: NDArray[np.integer]
    sample_index: NDArray[np.integer]
    shuffle_index: NDArray[np.integer]
    num_epochs: int

    def __len__(self) -> int:
        return len(self.shuffle_index)


def num_epochs_for(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> int:
    """Smallest E >= 1 whose E * tokens hold `num_samples` samples of S tokens and the one label token after them."""
    assert tokens_per_epoch > 0, "an empty split is refused before"
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def separate_final_epoch(
    tokens_per_epoch: int, seq_length: int, num_samples: int | None, num_epochs: int
) -> tuple[bool, int]:
    """Whether the last epoch is shuffled apart (so that its unused part is drawn from that epoch only), and the
    samples before it."""
    if num_epochs == 1 or num_samples is None:
        return False, 0
    before = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
    from_last = num_samples - before
    per_epoch = (tokens_per_epoch - 1) // seq_length
    assert 0 <= from_last <= per_epoch + 1
    return from_last < int(FINAL_EPOCH_SHARE * per_epoch), before


def build_order(
    lengths: NDArray[np.int32], begin: int, end: int, *, seq_length: int, num_samples: int | None, seed: int
) -> SampleOrder:
    """Order of the samples of the sequences `begin:end`.

    Args:
        lengths: tokens of every sequence of the file, int32 `[N]`.
        num_samples: samples wanted; at least as many are indexed (whole epochs). None: one epoch.
    """
    tokens = int(lengths[begin:end].sum(dtype=np.int64))
    epochs = num_epochs_for(tokens, seq_length, num_samples)
    separate, before = separate_final_epoch(tokens, seq_length, num_samples, epochs)
    random = np.random.RandomState(seed)
    document_index = _document_index(begin, end, epochs, random, separate)
    sample_index = build_sample_index(lengths, document_index, seq_length, total=epochs * tokens)
    total = len(sample_index) - 1
    shuffle_index = _shuffle_index(before if separate else total, total, random)
    return SampleOrder(document_index, sample_index, shuffle_index, epochs)


def _document_index(
    begin: int, end: int, epochs: int, random: np.random.RandomState, separate: bool
) -> NDArray[np.int32]:
    once = np.arange(begin, end, dtype=np.int32)
    if not separate:
        index = np.tile(once, epochs)
        random.shuffle(index)
        return index
    first = _document_index(begin, end, epochs - 1, random, False)
    return np.concatenate((first, _document_index(begin, end, 1, random, False)))


def _shuffle_index(first: int, total: int, random: np.random.RandomState) -> NDArray[np.integer]:
    """Shuffle `0:first` and `first:total` apart, one after the other."""
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    head = np.arange(first, dtype=dtype)
    random.shuffle(head)
    if first == total:
        return head
    tail = np.arange(first, total, dtype=dtype)
    random.shuffle(tail)
    return np.concatenate((head, tail))


def build_sample_index(
    lengths: NDArray[np.int32], document_index: NDArray[np.integer], seq_length: int, *, total: int | None = None
) -> NDArray[np.integer]:
    """Where every sample begins: rows (position in `document_index`, offset), `[n + 1, 2]`, n = (total - 1) // S.

    Row k is the place of stream token k * S. A search of every k * S among the ends of the documents would touch
    memory at random; the documents that end at or before k * S are counted instead: one ends there for every k >=
    ceil(end / S), so their number is a running sum over a histogram. Everything is a sequential pass.

    Args:
        lengths: tokens of every sequence, int32 `[N]`. document_index: order of the sequences in the stream.
        total: tokens of the stream, if the caller knows them.
    """
    sizes = lengths[document_index]
    if total is None:
        total = int(sizes.sum(dtype=np.int64))
    n = (total - 1) // seq_length
    wide = max(len(document_index), int(lengths.max(initial=0))) > INT32_MAX
    index = np.empty((n + 1, 2), np.int64 if wide else np.int32)
    # Positions in the stream fit 32 bits for most corpora, which halves the memory traffic.
    work = np.int32 if total + seq_length <= INT32_MAX else np.int64
    ends = np.cumsum(sizes, dtype=work)
    first_after = (ends + work(seq_length - 1)) // work(seq_length)
    document = np.cumsum(np.bincount(first_after, minlength=n + 1)[: n + 1], dtype=index.dtype)
    starts = ends - sizes
    index[:, 0] = document
    index[:, 1] = np.arange(n + 1, dtype=work) * work(seq_length) - starts[document]
    # The stream begins with the first entry of document_index, even where that one is empty.
    index[0] = 0
    return index
