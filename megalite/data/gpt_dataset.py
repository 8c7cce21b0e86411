"""Samples of S + 1 tokens in Megatron's order, over a store of documents."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megalite.data.cache import cached_arrays, digest_of
from megalite.data.gpt_index import SampleOrder, build_order, build_sample_index
from megalite.data.indexed import IndexedDataset
from megalite.data.remote_tokens import RemoteIndexedDataset
from megalite.data.splits import without
from megalite.data.token_store import TokenStore
from megalite.errors import DataError

# Changes when the meaning of the cached arrays does.
INDEX_VERSION = 1


class SampleSource(Protocol):
    """Source of a loader: a number of samples of S + 1 tokens, each reachable by its number alone."""

    seq_length: int

    def __len__(self) -> int: ...

    def expect(self, samples: Sequence[int]) -> None:
        """Says which samples will be read soon: those in a store are fetched."""
        ...

    def fill(self, sample: int, out: NDArray[np.int64]) -> int:
        """Write a sample into `out`, `[S + 1]`; returns the tokens that are there (fewer at a partial tail)."""
        ...

    def fill_marks(self, sample: int, out: NDArray[np.integer]) -> bool:
        """Write the marks of its tokens (`indexed.ANSWER`, `END`) into `out`; False where they have none."""
        ...


class GPTDataset:
    """One split of one token store.

    A run that is continued for longer than it was planned keeps the order that it began with and continues with
    further epochs. The first of `requests` is indexed as a fresh run; each further one that exceeds what is there adds
    a segment of whole epochs with its own shuffle (seed + number of the segment).

    begin, end: sequences of this split.
    requests: totals of samples, in the order in which they were asked for; None among them: one epoch.
    split: `train`, `valid` or `test`, for messages.
    cache_dir: where the arrays are kept; None: built in memory.
    vocab_size: ids at or above it are refused when they are read; None: not checked.
    tokenizer: whose vocabulary that is, for the message.
    Raises DataError where the split is empty or holds less than one sample.
    """

    def __init__(
        self,
        store: TokenStore,
        begin: int,
        end: int,
        *,
        seq_length: int,
        requests: Sequence[int | None],
        seed: int,
        split: str = "train",
        cache_dir: Path | None = None,
        vocab_size: int | None = None,
        tokenizer: str = "the tokenizer",
    ) -> None:
        assert requests, "at least one request"
        self.store, self.begin, self.end = store, begin, end
        self.seq_length, self.seed, self.split = seq_length, seed, split
        self.vocab_size, self.tokenizer = vocab_size, tokenizer
        self._cache_dir = cache_dir
        self.tokens_per_epoch = int(store.lengths[begin:end].sum(dtype=np.int64)) if end > begin else 0
        check_size(store.name, split, end - begin, self.tokens_per_epoch, seq_length)
        self._segments: list[SampleOrder] = []
        self._stops: list[int] = []
        for number, request in enumerate(requests):
            self._extend(number, request)

    def _extend(self, number: int, request: int | None) -> None:
        have = self._stops[-1] if self._stops else 0
        if self._stops and (request is None or request <= have):
            return
        order = self._order(None if request is None else request - have, self.seed + number)
        self._segments.append(order)
        self._stops.append(have + len(order.shuffle_index))

    def _order(self, num_samples: int | None, seed: int) -> SampleOrder:
        lengths = self.store.lengths

        def build() -> SampleOrder:
            return build_order(
                lengths,
                self.begin,
                self.end,
                seq_length=self.seq_length,
                num_samples=num_samples,
                seed=seed,
                split=self.split,
            )

        if self._cache_dir is None:
            return build()
        # The order depends on nothing else than this, so it cannot be stale.
        content = np.ascontiguousarray(lengths[self.begin : self.end]).tobytes()
        key = digest_of("order", INDEX_VERSION, content, self.begin, self.end, self.seq_length, num_samples, seed)

        def match(documents: NDArray[np.integer], samples: NDArray[np.integer], shuffle: NDArray[np.integer]) -> bool:
            return samples.shape == (len(shuffle) + 1, 2) and documents.ndim == 1 and len(shuffle) > 0

        return SampleOrder(*cached_arrays(self._cache_dir / "index", key, SampleOrder._fields, build, match))

    def documents_cut(self) -> tuple[int, int]:
        """(How many of its documents a sample ends in, how many there are), each epoch counted."""
        cut = number = 0
        for order in self._segments:
            places, inside = order.sample_index[1:-1].T.astype(np.int64)
            lengths = self.store.lengths[order.document_index[places]]
            # A sample begins with the last label of the one before: a document that ends there is whole.
            cut += len(np.unique(places[(inside > 0) & (inside < lengths - 1)]))
            number += len(order.document_index)
        return cut, number

    def __len__(self) -> int:
        return self._stops[-1]

    def cut(self, sample: int) -> tuple[list[int], int, int]:
        """The sequences that a sample reaches over, its offset in the first and its last token in the last."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        number = bisect_right(self._stops, sample)
        segment = self._segments[number]
        row = int(segment.shuffle_index[sample - (self._stops[number - 1] if number else 0)])
        (first, offset), (last, stop) = segment.sample_index[row].tolist(), segment.sample_index[row + 1].tolist()
        return segment.document_index[first : last + 1].tolist(), offset, stop

    def expect(self, samples: Sequence[int]) -> None:
        expect_pieces(self.store, [self.cut(sample) for sample in samples])

    def fill(self, sample: int, out: NDArray[np.int64]) -> int:
        sequences, offset, stop = self.cut(sample)
        count = self.copy(self.store, sequences, offset, stop, out)
        assert count == self.seq_length + 1
        check_ids(out, self, sequences, offset)
        return count

    def fill_marks(self, sample: int, out: NDArray[np.integer]) -> bool:
        marks = marks_of(self.store)
        if marks is not None:
            self.copy(marks, *self.cut(sample), out)
        return marks is not None

    @staticmethod
    def copy(store: TokenStore, sequences: Sequence[int], offset: int, stop: int, out: NDArray[np.integer]) -> int:
        """Copies what `cut` says, followed by zeros; returns how many tokens it is."""
        at = 0
        for place, sequence in enumerate(sequences):
            last = place == len(sequences) - 1
            tokens = store.get(sequence, offset if place == 0 else 0, stop + 1 if last else None)
            out[at : at + len(tokens)] = tokens
            at += len(tokens)
        out[at:] = 0
        return at

    def sequential(self) -> SequentialSource:
        """Reads the split once from its first to its last token, without overlap: for `--full-validation`."""
        return SequentialSource([self])


class SequentialSource:
    """The splits of `parts` one after the other, in the order of the documents: every token but a part's first is a
    label once. Sample k of a part holds its tokens k*S to k*S + S; the last one may be partial.
    """

    def __init__(self, parts: Sequence[GPTDataset]) -> None:
        self.seq_length = parts[0].seq_length
        self._parts = list(parts)
        self._stops = np.cumsum([-(-(part.tokens_per_epoch - 1) // self.seq_length) for part in parts]).tolist()

    @cached_property
    def _begins(self) -> list[NDArray[np.integer]]:
        return [self._begins_of(part) for part in self._parts]

    def _begins_of(self, part: GPTDataset) -> NDArray[np.integer]:
        """Where its samples begin, and the whole ones end: (document of the part, offset)."""
        documents = np.arange(part.begin, part.end)
        return build_sample_index(part.store.lengths, documents, self.seq_length, total=part.tokens_per_epoch)

    def __len__(self) -> int:
        return int(self._stops[-1])

    def expect(self, samples: Sequence[int]) -> None:
        for part, sequences, offset, stop in [self._cut(sample) for sample in samples]:
            expect_pieces(part.store, [(sequences, offset, stop)])

    def fill(self, sample: int, out: NDArray[np.int64]) -> int:
        part, sequences, offset, stop = self._cut(sample)
        count = part.copy(part.store, sequences, offset, stop, out)
        check_ids(out[:count], part, sequences, offset)
        return count

    def fill_marks(self, sample: int, out: NDArray[np.integer]) -> bool:
        part, sequences, offset, stop = self._cut(sample)
        marks = marks_of(part.store)
        if marks is not None:
            part.copy(marks, sequences, offset, stop, out)
        return marks is not None

    def _cut(self, sample: int) -> tuple[GPTDataset, Sequence[int], int, int]:
        """(Its part, and what `GPTDataset.cut` returns.)"""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        number = bisect_right(self._stops, sample)
        part, begins = self._parts[number], self._begins[number]
        row = sample - (self._stops[number - 1] if number else 0)
        first, offset = begins[row].tolist()
        if row + 1 < len(begins):
            last, stop = begins[row + 1].tolist()
        else:
            last = part.end - part.begin - 1
            stop = int(part.store.lengths[part.end - 1]) - 1
        return part, range(part.begin + first, part.begin + last + 1), offset, stop


def expect_pieces(store: TokenStore, cuts: Sequence[tuple[Sequence[int], int, int]]) -> None:
    """Announces to a store what samples need, by what `GPTDataset.cut` says of each."""
    if not isinstance(store, RemoteIndexedDataset):
        return
    pieces = []
    for sequences, offset, stop in cuts:
        ends = [int(store.lengths[sequence]) for sequence in sequences[:-1]] + [stop + 1]
        pieces += [(s, 0 if n else offset, end) for n, (s, end) in enumerate(zip(sequences, ends, strict=True))]
    store.expect(pieces)


def marks_of(store: TokenStore) -> IndexedDataset | None:
    """The marks of its tokens; None where it has none."""
    return store.marks if isinstance(store, IndexedDataset) else None


def check_size(name: str, split: str, documents: int, tokens: int, seq_length: int) -> None:
    flag = f"`data_path`={name}"
    if tokens == 0:
        raise DataError(
            f"{flag}: the {split} split is empty ({documents} documents, 0 tokens); "
            f"give more text or a larger part in `split`, or {without(split)}"
        )
    if tokens < seq_length + 1:
        raise DataError(
            f"{flag}: the {split} split is too small ({tokens} tokens, one sample of `seq_length`={seq_length} "
            f"needs {seq_length + 1}); give more text or a larger part in `split`, use a shorter `seq_length`, "
            f"or {without(split)}"
        )


def check_ids(ids: NDArray[np.int64], part: GPTDataset, sequences: Sequence[int], offset: int) -> None:
    """Refuse ids that the model has no embedding for: on an accelerator they would end the process without a word.

    ids: of one sample, which begins at token `offset` of the first of `sequences`.
    """
    if part.vocab_size is None or not ids.size:
        return
    if int(ids.min()) >= 0 and int(ids.max()) < part.vocab_size:
        return
    at = int(np.argmax((ids < 0) | (ids >= part.vocab_size)))
    ends = np.cumsum(part.store.lengths[list(sequences)], dtype=np.int64)
    sequence = sequences[int(np.searchsorted(ends, at + offset, "right"))]
    document = part.store.document_of(sequence) if isinstance(part.store, IndexedDataset) else sequence
    raise DataError(
        f"`data_path`={part.store.name}: document {document} holds token id {int(ids[at])}, outside of the vocabulary "
        f"of {part.tokenizer} (0..{part.vocab_size - 1}); name the tokenizer that wrote it"
    )
