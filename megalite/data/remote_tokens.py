"""Token files in an object store: the index on this host's disk, tokens by the ranges that the next batches need.

The order of the samples is known, so a loader announces them (`expect`): exact ranges, neighbours merged, are asked for
some micro-batches ahead, AT_ONCE requests a host. What is read without a word is fetched at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.data.cache import cached_folder, digest_of
from megalite.data.indexed import IndexedDataset
from megalite.errors import CheckpointError, DataError
from megalite.stores import Missing, RangesAhead, StoreUrl, place

logger = logging.getLogger(__name__)

AT_ONCE = 32
GAP_BYTES = 1 << 14  # between two ranges: they cost less than a request of their own


class RemoteTokens:
    """The tokens of a `.bin` in a store, sliced as an array is."""

    def __init__(self, url: StoreUrl, nbytes: int, dtype: np.dtype[np.integer], at_once: int) -> None:
        self.ahead = RangesAhead(url, at_once, math.inf, "tokens")
        self._dtype = dtype
        self._length = nbytes // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> NDArray[np.integer]:
        start, stop, _ = part.indices(self._length)
        size = self._dtype.itemsize
        try:
            return np.frombuffer(self.ahead.read(start * size, stop * size), self._dtype)
        except CheckpointError as error:  # a store's
            raise DataError(error.text) from None


class RemoteIndexedDataset(IndexedDataset):
    """A `.bin/.idx` pair under a URL. cache: where its index is kept on this host. at_once: requests of this process at
    a time."""

    def __init__(self, prefix: str, cache: Path, at_once: int, *, flag: str = "`data_path`") -> None:
        self._cache, self._at_once = cache, at_once
        super().__init__(prefix, flag=flag)

    def _files(self, flag: str) -> tuple[str, int]:
        index, tokens = self._url(".idx"), self._url(".bin")
        try:
            size, etag = index.store.tag(index.key)
            nbytes = tokens.store.size(tokens.key)
        except Missing:
            raise DataError(
                f"{flag}={self.prefix}: {index} or {tokens} not found; copy what tools/preprocess_data.py wrote there"
            ) from None
        except CheckpointError as error:
            raise DataError(f"{flag}={self.prefix}: {error.text}") from None

        def fetch(folder: Path) -> None:
            logger.info("fetching %s (%s bytes)", index, f"{size:,}")
            data = index.store.read(index.key, 0, size)
            if index.store.tag(index.key) != (size, etag):
                raise DataError(f"{flag}={self.prefix}: {index} was replaced while it was read; start again")
            (folder / "index").write_bytes(data)

        return str(cached_folder(self._cache, digest_of("idx", str(index), etag, size), fetch) / "index"), nbytes

    def _open_tokens(self, nbytes: int) -> RemoteTokens:
        self._remote = RemoteTokens(self._url(".bin"), nbytes, self.dtype, self._at_once)
        return self._remote

    def _pair(self, prefix: str, flag: str) -> RemoteIndexedDataset:
        return RemoteIndexedDataset(prefix, self._cache, self._at_once, flag=flag)

    def _url(self, suffix: str) -> StoreUrl:
        url = place(self.prefix + suffix)
        assert isinstance(url, StoreUrl)
        return url

    def expect(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        size = self.dtype.itemsize
        pieces = list(pieces)
        begins = [(int(self._pointers[sequence]), start, stop) for sequence, start, stop in pieces]
        self._remote.ahead.expect(((at + start * size, at + stop * size) for at, start, stop in begins), GAP_BYTES)
        if self.marks is not None:
            self.marks.expect(pieces)
