"""What samples are cut from: sequences of tokens, of files (`indexed.py`) or generated (`--mock-data`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

WRITTEN_BY = ".tokenizer.json"
"""Beside the pair PREFIX the file PREFIX.tokenizer.json, if any, names the tokenizer that wrote it."""

NUM_DOCUMENTS = 10_000
MAX_LENGTH = 4096


class Tokens(Protocol):
    """An array of tokens `[T]`, mapped or fetched."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> NDArray[np.integer]: ...


class TokenStore:
    """Sequences of tokens."""

    name: str  # for messages
    lengths: NDArray[np.int32]  # tokens of every sequence, `[N]`
    marks: TokenStore | None = None  # for each token its marks (`megalite.data.chat`)

    def get(self, sequence: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        """Tokens `start:stop` of a sequence; not to be written to. Raises IndexError."""
        raise NotImplementedError

    def document_of(self, sequence: int) -> int:
        """The document that a sequence belongs to."""
        return sequence

    def expect(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Announces tokens `start:stop` of sequences, as (sequence, start, stop): what is not here is fetched."""


class MockStore(TokenStore):
    """`--mock-data`: documents drawn from (seed, number of the document), which count from a start by a step, modulo
    `vocab_size`.

    A model can learn them (the step shows after two tokens), so a loss that does not fall on them is a fault. Each
    ends with `eod_id`, if there is one.
    """

    name = "`mock_data`"

    def __init__(self, *, seed: int, vocab_size: int, eod_id: int | None, documents: int = NUM_DOCUMENTS) -> None:
        self.seed, self.vocab_size, self.eod_id = seed, vocab_size, eod_id
        self.lengths = np.random.RandomState(seed).randint(1, MAX_LENGTH, documents).astype(np.int32) + 1

    def get(self, sequence: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        length = int(self.lengths[sequence])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"tokens {start}:{stop} of document {sequence}, which has {length}")
        # One generator per document: no document depends on which others were read before.
        first, step = np.random.default_rng((self.seed, sequence)).integers(0, self.vocab_size, 2).tolist()
        ids: NDArray[np.int64] = (first + np.arange(start, stop, dtype=np.int64) * (step % 7 + 1)) % self.vocab_size
        if self.eod_id is not None and stop == length and stop > start:
            ids[-1] = self.eod_id
        return ids
