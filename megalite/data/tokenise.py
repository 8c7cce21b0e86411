"""Text to tokens, piece by piece, in parts that outlive the process.

    documents -> pieces (cut after newlines) -> batches (encoded together) -> parts (kept) -> .bin/.idx

A finished part is kept in its own file until the whole is written, so a process that is killed after hours
leaves hours of work to the next one: pieces are the same each time, so their numbers say what is done.
"""

from __future__ import annotations

import itertools
import logging
import os
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.data.indexed import IndexedWriter, token_dtype
from megalite.data.tokenizer import Tokenizer
from megalite.errors import DataError
from megalite.progress import ProgressBar

logger = logging.getLogger(__name__)

PIECE = 1 << 20
BATCH_BYTES = 4 << 20
PART_BYTES = 32 << 20


def text_pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Cut a long text after newlines that stand between two non-space characters, about every `size` characters."""
    at = 0
    while len(text) - at > size:
        cut = text.find("\n", at + size)
        while 0 <= cut < len(text) - 1 and (text[cut - 1].isspace() or text[cut + 1].isspace()):
            cut = text.find("\n", cut + 1)
        if cut < 0 or cut >= len(text) - 1:
            break
        yield text[at : cut + 1]
        at = cut + 1
    if at < len(text):
        yield text[at:]


class TextPiece(NamedTuple):
    """A part of a document, and whether the document ends with it."""

    text: str
    ends: bool


class TokenisedPieces(NamedTuple):
    """Tokens of many pieces one after the other, and their UTF-8 bytes in all.

    lengths: tokens of each piece. ends: whether it ends a document.
    """

    ids: NDArray[np.integer]
    lengths: NDArray[np.int64]
    ends: NDArray[np.bool_]
    nbytes: int


def write_documents(
    prefix: Path, documents: Iterable[str], tokenizer: Tokenizer, *, ends_documents: bool
) -> tuple[int, int]:
    """Tokenises documents into the pair `prefix`; those without a token are left out. Returns tokens and UTF-8 bytes.

    Continues with the parts that an earlier call with the same arguments, which was killed, has left beside `prefix`.
    """
    folder = prefix.parent
    for torn in folder.glob("*.tmp-*"):
        torn.unlink()
    eod = np.array([tokenizer.eod_id] if ends_documents and tokenizer.eod_id is not None else [], np.int64)
    documents = list(documents)  # of a corpus that is read whole; so it is known how much there is to do
    watch = _Watch(sum(map(utf8_length, documents)))
    total = length = 0
    with watch.bar, IndexedWriter(prefix, vocab_size=tokenizer.vocab_size) as writer:
        for part in _parts(_pieces(documents, tokenizer), tokenizer, folder, watch):
            total += part.nbytes
            at = 0
            for count, ends in zip(part.lengths.tolist(), part.ends.tolist(), strict=True):
                writer.write(part.ids[at : at + count])
                at, length = at + count, length + count
                if not ends:
                    continue
                if length:
                    writer.write(eod)
                    length += len(eod)
                    if length > np.iinfo(np.int32).max:
                        raise DataError(f"{prefix}: a document of {length} tokens is too long for the format; cut it")
                    writer.extend(np.array([length], np.int32))
                length = 0
    for done in folder.glob("part_*.npz"):
        done.unlink()
    return writer.tokens, total


class _Watch:
    """Tells how far the work is. total: bytes of text."""

    def __init__(self, total: int) -> None:
        self.bar, self._done, self._total = ProgressBar("tokenising", "B"), 0, total

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self.bar(self._done, self._total)


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _pieces(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[TextPiece]:
    for text in documents:
        cut = list(text_pieces(text)) if tokenizer.splits_at_newline else [text]
        yield from (TextPiece(piece, number == len(cut)) for number, piece in enumerate(cut, 1))


def _parts(pieces: Iterator[TextPiece], tokenizer: Tokenizer, folder: Path, watch: _Watch) -> Iterator[TokenisedPieces]:
    """The parts in order, from their files where an earlier process has left them."""
    following = next(_grouped(pieces, PART_BYTES), None)
    for number in itertools.count():
        group, following = following, next(_grouped(pieces, PART_BYTES), None)
        if group is None:
            return
        path = folder / f"part_{number:05d}.npz"
        part = _read(path)
        if part is None or len(part.lengths) != len(group):
            part = _encode(group, tokenizer, watch)
            if following is not None:
                _keep(part, path)
        else:
            watch.add(part.nbytes)
            if number == 0:
                logger.info("continues with what an earlier process has tokenised")
        yield part


def _grouped(pieces: Iterator[TextPiece], size: int) -> Iterator[list[TextPiece]]:
    """The next pieces, together of at least `size` characters."""
    group: list[TextPiece] = []
    waiting = 0
    for piece in pieces:
        group.append(piece)
        waiting += len(piece.text)
        if waiting >= size:
            yield group
            group, waiting = [], 0
    if group:
        yield group


def _encode(group: list[TextPiece], tokenizer: Tokenizer, watch: _Watch) -> TokenisedPieces:
    dtype = token_dtype(tokenizer.vocab_size)
    ids: list[NDArray[np.integer]] = [np.empty(0, dtype)]
    lengths: list[int] = []
    nbytes = 0
    for batch in _grouped(iter(group), BATCH_BYTES):
        for array in tokenizer.encode_batch([piece.text for piece in batch]):
            fits = not array.size or int(array.max()) <= np.iinfo(dtype).max
            ids.append(array.astype(dtype, copy=False) if fits else array)  # the writer refuses what is too large
            lengths.append(len(array))
        size = sum(utf8_length(piece.text) for piece in batch)
        nbytes += size
        watch.add(size)
    return TokenisedPieces(
        np.concatenate(ids), np.array(lengths, np.int64), np.array([piece.ends for piece in group]), nbytes
    )


def _keep(part: TokenisedPieces, path: Path) -> None:
    staged = path.with_suffix(".tmp-npz")
    with open(staged, "wb") as file:
        np.savez(file, ids=part.ids, lengths=part.lengths, ends=part.ends, nbytes=np.int64(part.nbytes))
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, path)


def _read(path: Path) -> TokenisedPieces | None:
    """A part that was kept; None where there is none that is whole."""
    try:
        with np.load(path) as kept:
            return TokenisedPieces(kept["ids"], kept["lengths"], kept["ends"], int(kept["nbytes"]))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
