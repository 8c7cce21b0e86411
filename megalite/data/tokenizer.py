"""The protocol of tokenizers, and those that need no package: bytes, characters, numbers.

Everything that trains, evaluates or generates sees the `Tokenizer` protocol only. A tokenizer hands out the files that
it is made of, so that a checkpoint carries it and generation needs nothing else (`tokenizer_io.py` reads them back).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from megalite.errors import DataError

CHARS_FILE = "chars.json"

# Megatron's bound: the smallest type below it is what its own writer and reader pick.
UINT16_VOCAB_BOUND = 65500


class Tokenizer(Protocol):
    """Text to token ids and back."""

    kind: str  # the value of `--tokenizer-type`
    vocab_size: int  # the number of ids
    eod_id: int | None = None  # the end-of-document token, if there is one
    # Whether text may be cut after a newline between two non-space characters without changing a single id, so that
    # long texts can be tokenised in pieces.
    splits_at_newline: bool = False
    front: tuple[int, ...] = ()  # what its own library puts in front of a text (BOS, mostly); `encode` adds none
    beside: Mapping[str, bytes] = MappingProxyType({})  # files that travel with it and decide no id (`beside.py`)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; no special token is added."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Token ids `[n_i]` of every text: the fast way for many."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; the end-of-document token is left out."""
        ...

    def files(self) -> dict[str, bytes]:
        """Name and content of the files that this tokenizer is rebuilt from."""
        return {}

    def token_bytes(self) -> NDArray[np.int32] | None:
        """UTF-8 bytes that each id stands for, `[vocab_size]` (0 for special tokens); None where ids have no text, or
        do not spell all of it (a tokenizer that normalises, or has one id for all unknown characters).

        Bits per byte of a loss is `sum(loss) / ln 2 / sum(token_bytes[labels])`.
        """
        return None

    def describe(self) -> str:
        """One short line for the log."""
        return f"{self.kind} ({self.vocab_size} ids, end of document {self.eod_id})"


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Hex digest of everything that decides ids: equal digests mean equal ids, so it keys caches.

    Of `tokenizer_config.json` the end of a document counts alone, so another chat template there makes no other ids.
    """
    digest = xxhash.xxh3_128(f"{tokenizer.kind}:{tokenizer.vocab_size}:{tokenizer.eod_id}".encode())
    for name, content in sorted(tokenizer.files().items()):
        if name == "tokenizer_config.json":
            continue
        digest.update(f"\0{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def token_dtype(vocab_size: int) -> np.dtype[np.integer]:
    """Type of token ids on disk: Megatron's rule, uint16 where the vocabulary is below 65,500, else int32."""
    return np.dtype(np.uint16 if vocab_size < UINT16_VOCAB_BOUND else np.int32)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are ids 0..255; 256 ends a document. Needs no file and knows every text."""

    kind = "ByteTokenizer"
    vocab_size = 257
    eod_id = 256
    splits_at_newline = True

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        return [np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", "replace")

    def token_bytes(self) -> NDArray[np.int32]:
        return np.array([1] * 256 + [0], np.int32)

    def describe(self) -> str:
        return "ByteTokenizer (257 ids: 256 bytes and end of document)"


class CharTokenizer(Tokenizer):
    """One id per character of a fixed set, in the order of their code points; no end-of-document token.

    characters: the vocabulary, sorted and without repetition (`from_texts` makes it).
    Encoding raises DataError for a character outside the vocabulary.
    """

    kind = "CharTokenizer"
    splits_at_newline = True

    def __init__(self, characters: str) -> None:
        if not characters or list(characters) != sorted(set(characters)):
            raise DataError(
                "`tokenizer_type`=CharTokenizer: its characters must be sorted and differ; rebuild the vocabulary"
            )
        self.characters = characters
        self.vocab_size = len(characters)
        self._table = np.full(ord(characters[-1]) + 1, -1, np.int32)
        self._table[[ord(c) for c in characters]] = np.arange(len(characters))

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> CharTokenizer:
        """Vocabulary = every character that occurs in `texts`."""
        found = sorted(set(itertools.chain.from_iterable(texts)))
        if not found:
            raise DataError(
                "`tokenizer_type`=CharTokenizer: the text is empty (0 characters); give a file that holds text"
            )
        return cls("".join(found))

    @classmethod
    def from_json(cls, content: bytes, origin: str) -> CharTokenizer:
        """Read what `files` wrote; `origin` names the file in an error."""
        try:
            characters = json.loads(content)["characters"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"`tokenizer_model`={origin}: not a character vocabulary ({error})") from error
        if not isinstance(characters, str) or any("\ud800" <= char <= "\udfff" for char in characters):
            raise DataError(f"`tokenizer_model`={origin}: not a character vocabulary ('characters' must be text)")
        return cls(characters)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        return [self._lookup(text) for text in texts]

    def _lookup(self, text: str) -> NDArray[np.int32]:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        known = points < len(self._table)
        ids = self._table[np.where(known, points, 0)]
        bad = ~known | (ids < 0)
        if bad.any():
            at = int(bad.argmax())
            raise DataError(
                f"`tokenizer_type`=CharTokenizer: character {text[at]!r} (position {at}) is not among the "
                f"{self.vocab_size} of the vocabulary; use ByteTokenizer for any text"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in ids if 0 <= i < self.vocab_size)

    def files(self) -> dict[str, bytes]:
        return {CHARS_FILE: json.dumps({"characters": self.characters}).encode()}

    def token_bytes(self) -> NDArray[np.int32]:
        return np.array([len(c.encode("utf-8", "surrogatepass")) for c in self.characters], np.int32)

    def describe(self) -> str:
        return f"CharTokenizer ({self.vocab_size} characters, no end of document)"


class NullTokenizer(Tokenizer):
    """Text is already numbers: `"12 7 3"` is three ids below `vocab_size`; the last id ends a document.

    asked: what led to it, and fix: what leads to another, for the error about text.
    """

    kind = "NullTokenizer"

    def __init__(
        self, vocab_size: int, *, asked: str = "`tokenizer_type`=NullTokenizer", fix: str = "name another tokenizer"
    ) -> None:
        if vocab_size < 2:
            raise DataError(f"`vocab_size`={vocab_size}: NullTokenizer needs at least 2 ids (one is end of document)")
        self.vocab_size = vocab_size
        self.eod_id = vocab_size - 1
        self._asked, self._fix = asked, fix

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"{self._asked}: text must be numbers ({error}); {self._fix}") from error
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            outside = min(ids) if min(ids) < 0 else max(ids)
            raise DataError(
                f"`vocab_size`={self.vocab_size}: id {outside} of the text is outside 0..{self.vocab_size - 1}"
            )
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        return [np.array(self.encode(text), np.int64) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(i) for i in ids if i != self.eod_id)
