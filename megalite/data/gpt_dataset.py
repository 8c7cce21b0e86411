"""Samples of S + 1 tokens in Megatron's order, over a store of documents."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.data.cache import cached_arrays, digest_of
from megalite.data.gpt_index import SampleOrder, build_order, build_sample_index
from megalite.data.splits import without
from megalite.data.token_store import TokenStore
from megalite.errors import DataError

# Changes when the meaning of the cached arrays does.
INDEX_VERSION = 1


class Cut(NamedTuple):
    """The tokens of a sample: those of `sequences` in the store of a part, from token `offset` of the first sequence to
    token `stop` of the last."""

    part: GPTDataset
    sequences: Sequence[int]
    offset: int
    stop: int

    def copy(self, store: TokenStore, out: NDArray[np.integer]) -> int:
        """Copies them from `store`, followed by zeros; returns how many they are."""
        at = 0
        for sequence, begin, end in self.pieces():
            tokens = store.get(sequence, begin, end)
            out[at : at + len(tokens)] = tokens
            at += len(tokens)
        out[at:] = 0
        return at

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(sequence, first token, end) of each."""
        for place, sequence in enumerate(self.sequences):
            last = place == len(self.sequences) - 1
            end = self.stop + 1 if last else int(self.part.store.lengths[sequence])
            yield sequence, 0 if place else self.offset, end


class SampleSource:
    """Source of a loader: a number of samples of S + 1 tokens, each reachable by its number alone.

    stops: the number after the last sample of each part that they are cut from.
    """

    seq_length: int
    stops: Sequence[int]
    tails = False  # whether a sample may be shorter, at the end of what it is cut from

    def __len__(self) -> int:
        return self.stops[-1]

    def locate(self, sample: int) -> tuple[int, int]:
        """Which part has a sample, and its number there. Raises IndexError."""
        stops = self.stops
        if not 0 <= sample < stops[-1]:
            raise IndexError(f"sample {sample} of {stops[-1]}")
        part = bisect_right(stops, sample)
        return part, sample - (stops[part - 1] if part else 0)

    def cut(self, sample: int) -> Cut:
        """Where the tokens of a sample are. Raises IndexError."""
        raise NotImplementedError

    def expect(self, samples: Sequence[int]) -> None:
        """Says which samples will be read soon: those in a store are fetched."""
        for part, cuts in groupby(map(self.cut, samples), key=lambda cut: cut.part):
            part.store.expect(piece for cut in cuts for piece in cut.pieces())

    def read(self, sample: int, out: NDArray[np.int64], marks: NDArray[np.integer] | None = None) -> tuple[int, bool]:
        """Writes a sample into `out`, `[S + 1]`, and the marks of its tokens (`indexed.ANSWER`, `END`) into `marks`.

        Returns the tokens that are there (fewer at a partial tail), and whether they have marks.
        """
        cut = self.cut(sample)
        count = cut.copy(cut.part.store, out)
        assert self.tails or count == self.seq_length + 1
        check_ids(out[:count], cut)
        own = cut.part.store.marks
        if own is not None and marks is not None:
            cut.copy(own, marks)
        return count, own is not None


class GPTDataset(SampleSource):
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
        self.seq_length, self.split = seq_length, split
        self.vocab_size, self.tokenizer = vocab_size, tokenizer
        self.tokens_per_epoch = int(store.lengths[begin:end].sum(dtype=np.int64)) if end > begin else 0
        if self.tokens_per_epoch == 0:
            raise DataError(
                f"`data_path`={store.name}: the {split} split is empty ({end - begin} documents, 0 tokens); "
                f"give more text or a larger part in `split`, or {without(split)}"
            )
        if self.tokens_per_epoch < seq_length + 1:
            raise DataError(
                f"`data_path`={store.name}: the {split} split is too small ({self.tokens_per_epoch} tokens, one sample "
                f"of `seq_length`={seq_length} needs {seq_length + 1}); give more text or a larger part in `split`, "
                f"use a shorter `seq_length`, or {without(split)}"
            )
        self._segments: list[SampleOrder] = []
        self.stops: list[int] = []
        for number, request in enumerate(requests):
            have = self.stops[-1] if self.stops else 0
            if not self.stops or (request is not None and request > have):
                order = self._order(None if request is None else request - have, seed + number, cache_dir)
                self._segments.append(order)
                self.stops.append(have + len(order.shuffle_index))

    def _order(self, num_samples: int | None, seed: int, cache_dir: Path | None) -> SampleOrder:
        lengths, begin, end, length = self.store.lengths, self.begin, self.end, self.seq_length

        build = partial(
            build_order, lengths, begin, end, seq_length=length, num_samples=num_samples, seed=seed, split=self.split
        )

        def match(documents: NDArray[np.integer], samples: NDArray[np.integer], shuffle: NDArray[np.integer]) -> bool:
            return samples.shape == (len(shuffle) + 1, 2) and documents.ndim == 1 and len(shuffle) > 0

        # The order depends on nothing else than this, so it cannot be stale.
        content = np.ascontiguousarray(lengths[begin:end]).tobytes()
        key = digest_of("order", INDEX_VERSION, content, begin, end, length, num_samples, seed)
        return SampleOrder(*cached_arrays(cache_dir, key, SampleOrder._fields, build, match))

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

    def cut(self, sample: int) -> Cut:
        number, at = self.locate(sample)
        segment = self._segments[number]
        row = int(segment.shuffle_index[at])
        (first, offset), (last, stop) = segment.sample_index[row].tolist(), segment.sample_index[row + 1].tolist()
        return Cut(self, segment.document_index[first : last + 1].tolist(), offset, stop)

    def sequential(self) -> SequentialSource:
        """Reads the split once from its first to its last token, without overlap: for `--full-validation`."""
        return SequentialSource([self])


class SequentialSource(SampleSource):
    """The splits of `parts` one after the other, in the order of the documents: every token but a part's first is a
    label once. Sample k of a part holds its tokens k*S to k*S + S; the last one may be partial.
    """

    tails = True

    def __init__(self, parts: Sequence[GPTDataset]) -> None:
        self.seq_length = parts[0].seq_length
        self._parts = list(parts)
        self.stops = np.cumsum([-(-(part.tokens_per_epoch - 1) // self.seq_length) for part in parts]).tolist()

    @cached_property
    def _begins(self) -> list[NDArray[np.integer]]:
        """Of each part, where its samples begin, and the whole ones end: (document of the part, offset)."""
        return [
            build_sample_index(
                part.store.lengths, np.arange(part.begin, part.end), self.seq_length, total=part.tokens_per_epoch
            )
            for part in self._parts
        ]

    def cut(self, sample: int) -> Cut:
        number, row = self.locate(sample)
        part, begins = self._parts[number], self._begins[number]
        first, offset = begins[row].tolist()
        if row + 1 < len(begins):
            last, stop = begins[row + 1].tolist()
        else:
            last = part.end - part.begin - 1
            stop = int(part.store.lengths[part.end - 1]) - 1
        return Cut(part, range(part.begin + first, part.begin + last + 1), offset, stop)


class Conversations(SampleSource):
    """The documents of a split with marks, each in samples of its own, for a score that depends neither on what lies
    beside them nor on where samples begin.

    Each is read from its first token on, in samples of at most `window` labels, without overlap; what a sample lacks
    is padded. So a model sees of a label what lies before it in the conversation, as far as the window reaches.

    part: the split. window: of the model. unit: what the length of a sample is a multiple of, for ranks that share one;
    the window is one. Samples are as long as the longest conversation needs.
    """

    tails = True

    def __init__(self, part: GPTDataset, *, window: int, unit: int = 1) -> None:
        assert part.store.marks is not None, "text has no marks"
        labels = np.maximum(part.store.lengths[part.begin : part.end].astype(np.int64) - 1, 0)
        self.number, self.number_cut = len(labels), int((labels > window).sum())
        self.seq_length = min(window, max(1, -(-int(labels.max(initial=1)) // unit)) * unit)
        self._part = part
        self.stops = np.cumsum(-(-labels // self.seq_length)).tolist()

    def cut(self, sample: int) -> Cut:
        number, piece = self.locate(sample)
        document, offset = self._part.begin + number, piece * self.seq_length
        stop = min(offset + self.seq_length, int(self._part.store.lengths[document]) - 1)
        return Cut(self._part, [document], offset, stop)


def check_ids(ids: NDArray[np.int64], cut: Cut) -> None:
    """Refuse ids of a sample that the model has no embedding for: on an accelerator they would end the process without
    a word."""
    part, sequences = cut.part, cut.sequences
    if part.vocab_size is None or not ids.size:
        return
    if int(ids.min()) >= 0 and int(ids.max()) < part.vocab_size:
        return
    at = int(np.argmax((ids < 0) | (ids >= part.vocab_size)))
    ends = np.cumsum(part.store.lengths[list(sequences)], dtype=np.int64)
    sequence = sequences[int(np.searchsorted(ends, at + cut.offset, "right"))]
    raise DataError(
        f"`data_path`={part.store.name}: document {part.store.document_of(sequence)} holds token id {int(ids[at])}, "
        f"outside of the vocabulary of {part.tokenizer} (0..{part.vocab_size - 1}); name the tokenizer that wrote it"
    )
