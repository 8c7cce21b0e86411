"""What samples are cut from, as protocols."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

WRITTEN_BY = ".tokenizer.json"
"""Beside the pair PREFIX the file PREFIX.tokenizer.json, if any, names the tokenizer that wrote it."""


class Tokens(Protocol):
    """An array of tokens `[T]`, mapped or fetched."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> NDArray[np.integer]: ...


class TokenStore(Protocol):
    """Sequences of tokens that a sample is cut from: a memory-mapped file or generated ones."""

    name: str

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of every sequence, `[N]`."""
        ...

    def get(self, sequence: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        """Tokens `start:stop` of a sequence; not to be written to."""
        ...
