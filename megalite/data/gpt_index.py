"""The order of samples, Megatron's bit for bit: a pure function of lengths, seed, S and the number of samples.

The documents of a split are repeated for as many epochs as the run needs and shuffled into one long stream; the
stream is cut every S tokens; the cuts are shuffled again::

    document_index   d7 d2 d9 ...          order of the documents in the stream      int32  [E * documents]
    sample_index     |----|----|----       where each sample begins: (position in    int32  [n + 1, 2]
                      S    S    S          document_index, offset in that document)
    shuffle_index    4 0 2 ...             sample k of the run is cut number 4       uint32 [n]

A sample has S + 1 tokens: its last one is the first of the next cut, for the labels are the inputs moved by one.
The random stream is `numpy.random.RandomState(seed)`, used first for document_index, then for shuffle_index.
"""

import logging
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.errors import DataError
from megalite.host_memory import free_memory
from megalite.progress import OnProgress, ProgressBar, no_progress

logger = logging.getLogger(__name__)

# The last epoch is shuffled apart from the others where less than this part of it is used.
FINAL_EPOCH_SHARE = 0.80
# Bytes of an order above which making it is reported: it takes many seconds.
ANNOUNCED = 1 << 29
INT32_MAX = 2**31 - 1
# Documents of a block of `build_sample_index`: its arrays together fit a core's second-level cache.
BLOCK = 65536


class SampleOrder(NamedTuple):
    """The three arrays of the picture above."""

    document_index: NDArray[np.integer]
    sample_index: NDArray[np.integer]
    shuffle_index: NDArray[np.integer]


def num_epochs_for(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> int:
    """Smallest E >= 1 whose E * tokens hold `num_samples` samples of S tokens and the one label token after them."""
    assert tokens_per_epoch > 0, "an empty split is refused before"
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def separate_final_epoch(
    tokens_per_epoch: int, seq_length: int, num_samples: int | None, num_epochs: int
) -> tuple[bool, int]:
    """Whether the last epoch is shuffled apart, so that it alone leaves samples out, and the samples before it."""
    if num_epochs == 1 or num_samples is None:
        return False, 0
    before = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
    from_last = num_samples - before
    per_epoch = (tokens_per_epoch - 1) // seq_length
    assert 0 <= from_last <= per_epoch + 1
    return from_last < int(FINAL_EPOCH_SHARE * per_epoch), before


def build_order(
    lengths: NDArray[np.int32],
    begin: int,
    end: int,
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    split: str = "train",
) -> SampleOrder:
    """Order of the samples of the sequences `begin:end`.

    lengths: tokens of every sequence of the file, int32 `[N]`.
    num_samples: samples wanted; at least as many are indexed (whole epochs). None: one epoch.
    split: whose they are, for messages.
    Raises DataError where the order is larger than this machine's memory.
    """
    tokens = int(lengths[begin:end].sum(dtype=np.int64))
    epochs = num_epochs_for(tokens, seq_length, num_samples)
    needed = 4 * epochs * (end - begin) + 12 * (epochs * tokens // seq_length)
    free = free_memory()
    if needed > free:
        flag = "`train_iters`" if split == "train" else "`eval_iters`"
        raise DataError(
            f"{flag}: the order of {num_samples or 0:,} {split} samples, {epochs:,} epochs of {tokens:,} tokens, needs "
            f"{needed / 1e9:,.0f} GB and this machine has {free / 1e9:,.0f} free; use a smaller number, or more data"
        )
    if needed > ANNOUNCED:
        logger.info("building the order of %s %s samples (%.1f GB)", f"{num_samples:,}", split, needed / 1e9)
    separate, before = separate_final_epoch(tokens, seq_length, num_samples, epochs)
    random = np.random.RandomState(seed)
    document_index = np.tile(np.arange(begin, end, dtype=np.int32), epochs)
    _shuffle_apart(document_index, (epochs - separate) * (end - begin), random)
    with ProgressBar("indexing samples", "documents") as bar:
        sample_index = build_sample_index(lengths, document_index, seq_length, total=epochs * tokens, on_progress=bar)
    total = len(sample_index) - 1
    dtype = np.dtype(np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32)
    shuffle_index: NDArray[np.integer] = np.arange(total, dtype=dtype)
    _shuffle_apart(shuffle_index, before if separate else total, random)
    return SampleOrder(document_index, sample_index, shuffle_index)


def _shuffle_apart(index: NDArray[np.integer], first: int, random: np.random.RandomState) -> None:
    """Shuffles `0:first` and the rest in place, one after the other; where there is no rest it draws nothing for it."""
    random.shuffle(index[:first])
    random.shuffle(index[first:])


def build_sample_index(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.integer],
    seq_length: int,
    *,
    total: int | None = None,
    on_progress: OnProgress = no_progress,
) -> NDArray[np.integer]:
    """Finds where every sample begins: rows (position in `document_index`, offset), `[n + 1, 2]`, n = (total - 1) // S.

    Row k is the place of stream token k * S. Nothing is searched: of a document that covers the stream tokens a to b
    the samples ceil(a / S) to ceil(b / S) - 1 begin in it, so its row is repeated that often. It works in blocks that
    stay in a core's cache: memory is read once and written once, all that a compiled loop would cost.

    lengths: tokens of every sequence, int32 `[N]`.
    document_index: order of the sequences in the stream.
    total: tokens of the stream, if the caller knows them.
    """
    # The index of a file is not aligned in memory; gathering from it would copy the whole for every block.
    lengths = np.require(lengths, np.int32, ["A", "C"])
    if total is None:
        total = int(lengths[document_index].sum(dtype=np.int64))
    n = (total - 1) // seq_length
    if max(len(document_index), int(lengths.max(initial=0))) > INT32_MAX:
        return _sample_index_by_search(lengths, document_index, seq_length, n)
    index = np.empty((n + 1, 2), np.int32)
    rows = index.view(np.int64)[:, 0]
    block = min(BLOCK, len(document_index))
    numbers = np.arange(block, dtype=np.int32)
    row, sizes, repeat = np.empty((block, 2), np.int32), np.empty(block, np.int32), np.empty(block, np.intp)
    stream, done = 0, 0
    for first in range(0, len(document_index), block):
        documents = document_index[first : first + block]
        count = len(documents)
        # mode="clip" is the form that writes into `out` without a copy; the indices are legal anyway.
        size = np.take(lengths, documents, mode="clip", out=sizes[:count])
        tokens = int(size.sum(dtype=np.int64))
        # From here on positions are counted from the first token of the block, in 32 bits where they fit.
        work = np.dtype(np.int32 if tokens + seq_length <= INT32_MAX else np.int64)
        ends = np.cumsum(size, dtype=work)
        lead = stream - done * seq_length
        begun = (ends + work.type(lead + seq_length - 1)) // work.type(seq_length)
        repeat[0] = begun[0]
        np.subtract(begun[1:], begun[:-1], out=repeat[1:count])
        new = int(begun[-1])
        until = done + new
        offset = np.arange(-lead, new * seq_length - lead, seq_length, dtype=work)
        np.add(numbers[:count], first, out=row[:count, 0])
        if work == np.int32:
            np.subtract(size, ends, out=row[:count, 1])
            rows[done:until] = np.repeat(row[:count].view(np.int64)[:, 0], repeat[:count])
            index[done:until, 1] += offset
        else:
            index[done:until, 0] = np.repeat(row[:count, 0], repeat[:count])
            index[done:until, 1] = offset - np.repeat(ends - size, repeat[:count])
        stream, done = stream + tokens, until
        on_progress(first + count, len(document_index), "")
    # The stream begins with the first entry of document_index, even where that one is empty.
    index[0] = 0
    return index


def _sample_index_by_search(
    lengths: NDArray[np.int32], document_index: NDArray[np.integer], seq_length: int, n: int
) -> NDArray[np.int64]:
    """`build_sample_index` in 64 bits, for streams of 2^31 documents: each k * S is searched among their ends."""
    sizes = lengths[document_index]
    ends = np.cumsum(sizes, dtype=np.int64)
    position = np.arange(n + 1, dtype=np.int64) * seq_length
    document = np.searchsorted(ends, position, side="right")
    index = np.stack([document, position - (ends - sizes)[document]], axis=1)
    index[0] = 0
    return index
