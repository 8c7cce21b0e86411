"""Token files in Megatron's `.bin/.idx` form, written and memory-mapped.

`.bin` holds the raw little-endian tokens of all sequences back to back. `.idx`, little-endian, N sequences, D =
documents + 1::

    0   9   magic b"MMIDIDX\\0\\0"            18        8   u64 N
    9   8   u64 version = 1                  26        8   u64 D
    17  1   u8  dtype code                   34        4N  i32 length of each sequence, in tokens
                                             34+4N     8N  i64 byte offset of each sequence in .bin
                                             34+12N    8D  i64 sequence at which each document begins; the last
                                                           entry is N
                                             34+12N+8D  N  i8  mode of each sequence (optional; see `MARKED`)

A file of unknown origin is data, never trust: every count and offset is checked against the file sizes before it is
used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megalite.data.token_store import WRITTEN_BY, Tokens, TokenStore
from megalite.data.tokenizer import token_dtype
from megalite.errors import DataError
from megalite.files import served_url

logger = logging.getLogger(__name__)

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.integer]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
FLOAT_CODES = (6, 7)
MARKS, MARKED = "_marks", 77
"""Of a pair whose sequences have this mode, the pair PREFIX_marks tells the marks of each token."""
ANSWER, END = 1, 2
"""Marks of a token: the loss counts it; a document ends with it."""
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
KNOWN_MAGIC = {
    b"PK\x03\x04": "a zip",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"PAR1": "parquet",
    b"{": "JSON",
}


def strip_suffix(path: str) -> str:
    """The prefix that `path` belongs to: without `.bin` or `.idx`."""
    return path[:-4] if path.endswith((".bin", ".idx")) else path


def is_indexed(prefix: str) -> bool:
    """Whether a pair is there; of what a URL names only a pair can be read."""
    return served_url(prefix) is not None or os.path.isfile(prefix + ".bin") and os.path.isfile(prefix + ".idx")


class IndexedDataset(TokenStore):
    """A `.bin/.idx` pair, memory-mapped: opening it reads the index only.

    prefix: path without `.bin` / `.idx`.
    document_indices: sequence at which every document begins, `[documents + 1]`, the last entry N.
    dtype: of the stored ids.
    Raises DataError where a file is missing, is not such an index, or contradicts the other one; `flag` named them.
    """

    marks: IndexedDataset | None = None

    def __init__(self, prefix: str | Path, *, flag: str = "`data_path`") -> None:
        self.prefix = self.name = str(prefix)
        try:
            index, bin_bytes = self._files(flag)
            empty = not os.path.getsize(index)
            raw = np.empty(0, np.uint8) if empty else np.memmap(index, mode="r", dtype=np.uint8)
            self._parse(raw, self.prefix + ".idx", bin_bytes)
            self._tokens = self._open_tokens(bin_bytes)
        except OSError as error:
            raise DataError(f"{flag}={self.prefix}: cannot be read ({error.strerror})") from None
        if self._marked:
            self.marks = self._pair(self.prefix + MARKS, flag)
            if not np.array_equal(self.marks.lengths, self.lengths):
                raise DataError(
                    f"{flag}={self.prefix}: {self.prefix}{MARKS} marks other tokens; run tools/preprocess_data.py again"
                )

    def _files(self, flag: str) -> tuple[str, int]:
        """Where the index lies on this host's disk, and the bytes of the `.bin`. Raises DataError, OSError."""
        if self.prefix.endswith((".bin", ".idx")) and os.path.isfile(self.prefix):
            raise DataError(f"{flag}={self.prefix}: give the prefix, '{strip_suffix(self.prefix)}'")
        for suffix in (".idx", ".bin"):
            if not os.path.isfile(self.prefix + suffix):
                raise DataError(
                    f"{flag}={self.prefix}: {self.prefix}{suffix} not found; run tools/preprocess_data.py or name "
                    "a text file"
                )
        return self.prefix + ".idx", os.path.getsize(self.prefix + ".bin")

    def _open_tokens(self, nbytes: int) -> Tokens:
        """The tokens of the `.bin`."""
        # A plain array over the map: slices of the memmap class itself cost several times as much.
        return np.asarray(np.memmap(self.prefix + ".bin", mode="r", dtype=self.dtype))

    def _pair(self, prefix: str, flag: str) -> IndexedDataset:
        """Another pair in the same place."""
        return IndexedDataset(prefix, flag=flag)

    def _parse(self, raw: NDArray[np.uint8], path: str, bin_bytes: int) -> None:
        head = raw[: HEADER.size].tobytes()
        if head[:9] != MAGIC:
            guess = next((f": {what}?" for start, what in KNOWN_MAGIC.items() if head.startswith(start)), "")
            raise DataError(
                f"{path}: not a megalite/Megatron index (magic {head[:4].hex() or 'missing, the file is empty'}{guess})"
            )
        if len(head) < HEADER.size:
            raise DataError(f"{path}: cut off ({len(head)} bytes, the header alone has {HEADER.size}); write it again")
        _, version, code, n, d = HEADER.unpack(head)
        if version != VERSION:
            raise DataError(f"{path}: index version {version}, this megalite reads {VERSION}")
        if code not in DTYPES:
            what = "floating point numbers, not tokens" if code in FLOAT_CODES else "unknown"
            raise DataError(f"{path}: dtype code {code} is {what}; run tools/preprocess_data.py again")
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        expected = HEADER.size + 12 * n + 8 * d
        if raw.size not in (expected, expected + n):
            raise DataError(
                f"{path}: {n} sequences and {max(d - 1, 0)} documents need {expected} bytes, the file has "
                f"{raw.size}; write it again"
            )
        self._marked = bool((raw[expected:] == MARKED).any())
        at = HEADER.size
        self.lengths = np.frombuffer(raw, "<i4", n, at)
        self._pointers = np.frombuffer(raw, "<i8", n, at + 4 * n)
        self.document_indices = np.frombuffer(raw, "<i8", d, at + 12 * n)
        self._check_arrays(path, bin_bytes)

    def _check_arrays(self, path: str, bin_bytes: int) -> None:
        lengths, pointers, documents, n = self.lengths, self._pointers, self.document_indices, len(self.lengths)
        bin_path = self.prefix + ".bin"
        if n == 0 or bin_bytes == 0 or not lengths.any():
            raise DataError(f"{bin_path}: 0 tokens; write it again from a text that is not empty")
        if int(lengths.min()) < 0:
            raise DataError(f"{path}: damaged (sequence {int(lengths.argmin())} has a negative length)")
        itemsize = self.dtype.itemsize
        if bin_bytes % itemsize:
            raise DataError(
                f"{bin_path}: {bin_bytes} bytes are no whole number of {self.dtype.name} tokens; write both files again"
            )
        if int(pointers.min()) < 0 or int(pointers.max()) > bin_bytes or (pointers % itemsize).any():
            raise DataError(f"{path}: damaged (a sequence begins outside of {bin_path}, {bin_bytes} bytes)")
        # Both terms are bounded now (pointer <= file size, length < 2^31), so the sum cannot overflow.
        ends = pointers + lengths.astype(np.int64) * itemsize
        if int(ends.max()) > bin_bytes:
            bad = int(np.argmax(ends > bin_bytes))
            raise DataError(
                f"{bin_path}: cut off ({bin_bytes} bytes, the index says {int(ends.max())}; first missing: "
                f"sequence {bad}); write both files again"
            )
        self._check_cover(path, ends, bin_bytes)
        if len(documents) == 0 or documents[0] != 0 or documents[-1] != n or (documents[1:] < documents[:-1]).any():
            raise DataError(f"{path}: damaged (document boundaries must rise from 0 to {n})")

    def _check_cover(self, path: str, ends: NDArray[np.int64], bin_bytes: int) -> None:
        """Sequences back to back, as writers leave them, must fill the file; others may leave parts out, not share."""
        pointers = self._pointers
        used = int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        self._back_to_back = bool(pointers[0] == 0 and (pointers[1:] == ends[:-1]).all())
        if self._back_to_back:
            if used != bin_bytes:
                raise DataError(
                    f"{self.prefix}.bin: {bin_bytes} bytes, {path} describes {used}; is it the index of another "
                    "corpus, or was its writer stopped? write both files again"
                )
            return
        filled = np.flatnonzero(self.lengths)
        order = filled[np.argsort(pointers[filled], kind="stable")]
        shared = np.flatnonzero(pointers[order][1:] < ends[order][:-1])
        if len(shared):
            first, second = (int(order[shared[0] + k]) for k in (0, 1))
            raise DataError(
                f"{path}: damaged (sequences {first} and {second} overlap at byte {int(pointers[second])} of "
                f"{self.prefix}.bin); write both files again"
            )
        if used != bin_bytes:
            logger.warning("%s leaves out %d of the %d bytes of %s.bin", path, bin_bytes - used, bin_bytes, self.prefix)

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, sequence: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        length = int(self.lengths[sequence])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"tokens {start}:{stop} of sequence {sequence}, which has {length}")
        at = int(self._pointers[sequence]) // self.dtype.itemsize
        return self._tokens[at + start : at + stop]

    def chunks(self, tokens: int = 1 << 23) -> Iterator[NDArray[np.integer]]:
        """All tokens in the order of the sequences, in pieces of about `tokens`."""
        if self._back_to_back:
            for start in range(0, len(self._tokens), tokens):
                yield self._tokens[start : start + tokens]
        else:
            for sequence in range(len(self)):
                yield self.get(sequence)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum(dtype=np.int64))

    def stream(self, start: int, stop: int) -> NDArray[np.integer]:
        """Tokens `start:stop` of all sequences back to back."""
        if self._back_to_back:
            return self._tokens[start:stop]
        parts = []
        first, last = int(np.searchsorted(self._ends, start, "right")), int(np.searchsorted(self._ends, stop))
        for sequence in range(first, last + 1):
            begin = int(self._ends[sequence]) - int(self.lengths[sequence])
            parts.append(self.get(sequence)[max(0, start - begin) : stop - begin])
        return np.concatenate(parts)

    def document_at(self, token: int) -> int:
        """Number of the document that holds token number `token` of `stream`."""
        return self.document_of(int(np.searchsorted(self._ends, token, "right")))

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """Tokens up to the end of every sequence, `[N]`."""
        return np.cumsum(self.lengths, dtype=np.int64)

    def document_of(self, sequence: int) -> int:
        return int(np.searchsorted(self.document_indices, sequence, "right")) - 1


class IndexedWriter:
    """Write a `.bin/.idx` pair; both appear under their names only when `close` has written the whole (the index last).

    Used as a context manager it closes at a normal end and leaves nothing at an exception.

    prefix: path without suffix; its folder is made.
    vocab_size: decides the type on disk (`token_dtype`), unless `dtype` is given.
    partial: tokens are written to `PREFIX.bin.partial`, which outlives an exception; what stands there already is taken
    over (`following`, and counted in `tokens`) or cut off (`cut`).
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        vocab_size: int | None = None,
        dtype: np.dtype[np.integer] | None = None,
        marked: bool = False,
        partial: bool = False,
    ) -> None:
        assert (vocab_size is None) != (dtype is None), "give vocab_size or dtype"
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype) if dtype is not None else token_dtype(vocab_size or 0)
        self._lengths: list[NDArray[np.int32]] = []
        self._documents: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._sequences = self._open = 0  # _open: tokens of a document that goes on
        self.tokens = self.documents = 0
        self._marked = marked
        self._partial = partial
        ending = "partial" if partial else f"tmp-{os.getpid()}"
        self._temporary = [f"{self.prefix}{suffix}.{ending}" for suffix in (".bin", ".idx")]
        try:
            os.makedirs(os.path.dirname(os.path.abspath(self.prefix)), exist_ok=True)
            self._bin = open(self._temporary[0], "a+b" if partial else "wb")  # noqa: SIM115 (closed at the exit)
        except OSError as error:
            raise DataError(f"{self.prefix}.bin: cannot be written ({error.strerror}); name another folder") from None

    def add_document(self, ids: ArrayLike) -> None:
        """Append one document of one sequence: ids `[n]`; of none if n is 0."""
        array = np.asarray(ids)
        self.write(array)
        self.extend(np.array([array.size], np.int32))

    def append(self, other: IndexedDataset, on_write: Callable[[], None] | None = None) -> None:
        """Append all documents of another pair, in order; its sequences and document boundaries are kept."""
        for tokens in other.chunks():
            self.write(tokens)
            if on_write is not None:
                on_write()
        self._lengths.append(np.array(other.lengths, np.int32))
        self._documents.append(other.document_indices[1:] + self._sequences)
        self._sequences += len(other)

    def extend(self, lengths: NDArray[np.int32], *, goes_on: bool = False) -> None:
        """Note documents whose tokens are written already; one without a token has no sequence, as in Megatron. The
        last one may go on: the first of the next call is then its rest."""
        sizes = lengths.astype(np.int64)
        sizes[:1] += self._open
        self._open = int(sizes[-1]) if goes_on else 0
        sizes = sizes[: len(sizes) - goes_on]
        if (longest := int(sizes.max(initial=0))) > np.iinfo(np.int32).max:
            raise DataError(f"{self.prefix}: a document of {longest} tokens is too long for the format; cut it")
        filled = sizes > 0
        self.documents += len(sizes)
        self._documents.append(np.cumsum(filled, dtype=np.int64) + self._sequences)
        self._lengths.append(sizes[filled].astype(np.int32))
        self._sequences += int(filled.sum())

    def write(self, ids: NDArray[np.integer]) -> None:
        """Append tokens; `extend` says which documents they are."""
        if ids.dtype != self.dtype and ids.size:
            bounds = np.iinfo(self.dtype)
            if int(ids.min()) < bounds.min or int(ids.max()) > bounds.max:
                raise DataError(
                    f"{self.prefix}.bin: dtype {self.dtype} cannot hold id {int(ids.max())}; the vocabulary is "
                    "larger than announced"
                )
        with self._writing():
            self._bin.write(np.ascontiguousarray(ids, self.dtype).data)
        self.tokens += int(ids.size)

    def following(self, count: int) -> NDArray[np.integer]:
        """The next `count` tokens of a partial file. Raises ValueError if there are fewer."""
        at, nbytes = self.tokens * self.dtype.itemsize, count * self.dtype.itemsize
        if not 0 <= nbytes <= os.fstat(self._bin.fileno()).st_size - at:
            raise ValueError(count)
        self._bin.seek(at)
        return np.frombuffer(self._bin.read(nbytes), self.dtype)

    def flush(self) -> None:
        """From here on the tokens outlive the process in a partial file."""
        with self._writing():
            self._bin.flush()

    def cut(self) -> None:
        """Cuts off what follows the written tokens in a partial file."""
        self._bin.truncate(self.tokens * self.dtype.itemsize)

    def close(self) -> None:
        """Finish both files and give them their names."""
        lengths = np.concatenate(self._lengths) if self._lengths else np.empty(0, np.int32)
        documents = np.concatenate(self._documents)
        pointers = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        with self._writing():
            self._bin.flush()
            os.fsync(self._bin.fileno())
            self._bin.close()
            with open(self._temporary[1], "wb") as file:
                file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(documents)))
                for array, form in ((lengths, "<i4"), (pointers, "<i8"), (documents, "<i8")):
                    file.write(np.ascontiguousarray(array, form).data)
                file.write(bytes([MARKED]) * len(lengths) if self._marked else b"")
                file.flush()
                os.fsync(file.fileno())
        index = Path(self.prefix + ".idx")
        replaced = os.path.exists(self.prefix + ".bin")
        index.unlink(missing_ok=True)  # an old index must never describe a new .bin, whenever this is killed
        Path(self.prefix + WRITTEN_BY).unlink(missing_ok=True)  # it named the tokenizer of the old .bin
        os.replace(self._temporary[0], self.prefix + ".bin")
        os.replace(self._temporary[1], index)
        if replaced:
            logger.warning("%s.bin and .idx were there already; they are replaced", self.prefix)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self.prefix}.bin: cannot be written ({error.strerror or error}); make room, or name another folder"
            ) from None

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(OSError):  # of a full disk: what is buffered has no room
            self._bin.close()
        for path in self._temporary[1:] if self._partial else self._temporary:
            Path(path).unlink(missing_ok=True)
