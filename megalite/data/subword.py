"""Subword tokenizers of the field, through the packages `tokenizers` and `sentencepiece`, imported where they are used.

Byte-level BPE: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). SentencePiece: Kudo &
Richardson (2018).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.byte_level import WordTable
from megalite.data.hostile_tokenizer import MOST_BYTES, check_growth, check_ids, probe, within
from megalite.data.tokenizer import Tokenizer
from megalite.errors import DataError
from megalite.extras import optional_package
from megalite.strangers import read_limited

# What ends a document in the public families, in the order of the search where a tokenizer.json comes alone.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "<|eos|>")


def read_file(path: str | Path, flag: str) -> bytes:
    """Content of a file that `flag` names. Raises DataError."""
    return read_limited(path, flag, MOST_BYTES)


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in character of every byte: {character: byte}."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


class _FastTokenizer(Tokenizer):
    """Shared by the two kinds that run on a `tokenizers.Tokenizer`, the `backend`."""

    def __init__(self, backend: Any, eod_id: int | None, origin: str) -> None:
        self.backend = backend
        self.eod_id = eod_id
        self._origin = origin
        # Ids may have holes (added tokens far above the model's): the vocabulary ends after the largest.
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab_size == 0:
            raise DataError(f"`tokenizer_type`={self.kind}: the vocabulary is empty (0 tokens)")
        check_ids(self.vocab_size - 1, origin)
        self.definition = json.loads(backend.to_str())
        check_growth(self.definition, origin)
        probe(backend, origin)
        self.front = tuple(_in_front(self.definition.get("post_processor") or {}))
        if max(self.front, default=0) >= self.vocab_size:
            raise DataError(
                f"{origin}: puts id {max(self.front)} in front of texts; its ids end at {self.vocab_size - 1}"
            )
        # GPT-2's pre-tokenizer alone: no word reaches over a newline between two non-space characters
        pre, model = self.definition.get("pre_tokenizer") or {}, self.definition.get("model") or {}
        plain = pre.get("type") == "ByteLevel" and not pre.get("add_prefix_space") and pre.get("use_regex", True)
        deterministic = model.get("type") == "BPE" and not model.get("dropout")
        self.splits_at_newline = bool(plain and deterministic and not self.definition.get("normalizer"))
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        self._table = WordTable(self.encode, added) if self.splits_at_newline else None

    def encode(self, text: str) -> list[int]:
        with within(self._origin, "fails on a text"):
            return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        if self._table is not None:
            return list(self._table.encode_batch(texts, self._library_batch))
        return self._library_batch(texts)

    def _library_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        with within(self._origin, "fails on a text"):
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        with within(self._origin, "fails on its own ids"):
            return str(self.backend.decode([i for i in ids if i != self.eod_id], skip_special_tokens=False))

    def token_bytes(self) -> NDArray[np.int32] | None:
        if not _keeps_text(self):
            return None
        counts = np.zeros(self.vocab_size, np.int32)
        added = self.backend.get_added_tokens_decoder()
        alphabet = byte_level_alphabet() if _decodes_bytes(self.definition.get("decoder")) else None
        for token, index in self.backend.get_vocab(with_added_tokens=True).items():
            if index in added:
                counts[index] = 0 if added[index].special else len(token.encode())
            elif alphabet is not None and all(c in alphabet for c in token):
                counts[index] = len(token)
            else:
                counts[index] = _piece_bytes(token)
        return counts


def _in_front(processor: dict[str, Any]) -> list[int]:
    """Ids that a post-processor puts in front of a text."""
    kind, found = processor.get("type"), list[int]()
    if kind == "Sequence":  # each works on what the one before has made
        return [index for part in reversed(processor["processors"]) for index in _in_front(part)]
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [processor["cls"][1]]
    for piece in processor["single"] if kind == "TemplateProcessing" else ():
        if "SpecialToken" not in piece:
            break
        found += processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return found


# What tokenizers are known to change: runs of spaces, compatibility forms, accents, case, breaks, rare characters.
PROBE = "An  \uff21\ufb01\u00a0\u2460 Cafe\u0301 B.\tc\nd \U00010348, e"


def _keeps_text(tokenizer: Tokenizer) -> bool:
    """Whether the ids of a text spell all of it: where they do not, its bytes cannot be counted from them."""
    try:
        return tokenizer.decode(tokenizer.encode(PROBE)) == PROBE
    except DataError:  # a character that its vocabulary does not have
        return False


def _decodes_bytes(decoder: dict[str, Any] | None) -> bool:
    if not decoder:
        return False
    return decoder.get("type") == "ByteLevel" or any(_decodes_bytes(part) for part in decoder.get("decoders", ()))


def _piece_bytes(piece: str) -> int:
    """UTF-8 bytes of a sentencepiece-like piece: `<0x0A>` is one byte, U+2581 a space, a word-piece mark nothing."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return 1
    return len(piece.replace("\u2581", " ").removeprefix("##").encode("utf-8", "surrogatepass"))


class GPT2BPETokenizer(_FastTokenizer):
    """GPT-2's byte-level BPE from the content of `vocab.json` and `merges.txt`; `<|endoftext|>` ends a document."""

    kind = "GPT2BPETokenizer"

    def __init__(
        self, vocab: bytes, merges: bytes, *, vocab_name: str = "vocab.json", merges_name: str = "merges.txt"
    ) -> None:
        import tokenizers

        self._vocab, self._merges = vocab, merges
        try:
            table = {str(token): int(index) for token, index in json.loads(vocab).items()}
        except (ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(f"`vocab_file`={vocab_name}: not a JSON object of token to id ({error})") from None
        check_ids(max(table.values(), default=0), f"`vocab_file`={vocab_name}")
        with within(f"`merge_file`={merges_name}", "does not fit the vocabulary"):
            model = tokenizers.models.BPE(table, _parse_merges(merges.decode()))
        backend = tokenizers.Tokenizer(model)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        eod = "<|endoftext|>"
        if eod in table:
            backend.add_special_tokens([tokenizers.AddedToken(eod, special=True, normalized=True)])
        super().__init__(backend, table.get(eod), f"`vocab_file`={vocab_name}")

    def files(self) -> dict[str, bytes]:
        return {"vocab.json": self._vocab, "merges.txt": self._merges}


def _parse_merges(text: str) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        words = line.rstrip("\r").split(" ")
        if len(words) != 2:
            raise ValueError(f"line {number} is not a pair")
        pairs.append((words[0], words[1]))
    return pairs


class HuggingFaceTokenizer(_FastTokenizer):
    """Any `tokenizer.json`. No special token is added by `encode`: document boundaries are `--append-eod`'s.

    definition: content of `tokenizer.json`.
    config: content of `tokenizer_config.json` beside it, if any, which names the end-of-document token (`eos_token`).
    origin: the path, for errors.
    """

    kind = "HuggingFaceTokenizer"

    def __init__(self, definition: bytes, config: bytes | None = None, *, origin: str = "tokenizer.json") -> None:
        import tokenizers

        self._json, self._config = definition, config
        with within(f"`tokenizer_model`={origin}", "not a tokenizer.json"):
            backend = tokenizers.Tokenizer.from_str(definition.decode())
        backend.no_truncation()
        backend.no_padding()
        super().__init__(backend, _find_eod(backend, config, origin), f"`tokenizer_model`={origin}")

    @classmethod
    def from_path(cls, path: str | Path) -> HuggingFaceTokenizer:
        """Load a `tokenizer.json` or the directory that holds one."""
        where = Path(path)
        file = where / "tokenizer.json" if where.is_dir() else where
        if where.is_dir() and os.access(where, os.X_OK) and not file.is_file():
            raise DataError(
                f"`tokenizer_model`={path}: the directory holds no tokenizer.json; save the tokenizer with its "
                "fast form"
            )
        definition = read_file(file, "`tokenizer_model`")
        beside = file.parent / "tokenizer_config.json"
        config = read_file(beside, "`tokenizer_model`") if beside.is_file() else None
        return cls(definition, config, origin=str(path))

    def files(self) -> dict[str, bytes]:
        files = {"tokenizer.json": self._json}
        return files if self._config is None else files | {"tokenizer_config.json": self._config}


def _find_eod(backend: Any, config: bytes | None, origin: str) -> int | None:
    if config is not None:
        try:
            named = json.loads(config).get("eos_token")
        except (ValueError, AttributeError, RecursionError) as error:
            raise DataError(
                f"`tokenizer_model`={origin}: tokenizer_config.json beside it is not a JSON object ({error})"
            ) from None
        content = named.get("content") if isinstance(named, dict) else named
        if isinstance(content, str):
            with within(f"`tokenizer_model`={origin}", "tokenizer_config.json beside it: eos_token is no text"):
                index = backend.token_to_id(content)
            if index is not None:
                return int(index)
    return next((int(i) for i in map(backend.token_to_id, EOD_NAMES) if i is not None), None)


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model; its end-of-sentence piece ends a document.

    model: content of the `.model` file.
    origin: its path, for errors.
    flag: what asked for it, as the user gave it.
    Raises ConfigError without the package sentencepiece, DataError where `model` is not a sentencepiece model.
    """

    kind = "SentencePieceTokenizer"

    def __init__(self, model: bytes, *, origin: str = "tokenizer.model", flag: str | None = None) -> None:
        sentencepiece = optional_package(flag or f"`tokenizer_type`={self.kind}", "sentencepiece")
        self._model = model
        self._backend = sentencepiece.SentencePieceProcessor()
        found = "not a sentencepiece model"
        if model[:64].lstrip().startswith(b"{"):
            found = "a tokenizer.json, not a sentencepiece model; add `tokenizer_type`=HuggingFaceTokenizer"
        with within(f"`tokenizer_model`={origin}", found):
            self._backend.LoadFromSerializedProto(model)
        self.vocab_size = int(self._backend.GetPieceSize())
        eos = int(self._backend.eos_id())
        self.eod_id = eos if eos >= 0 else None

    @classmethod
    def from_path(cls, path: str | Path, flag: str | None = None) -> SentencePieceTokenizer:
        """Load a `.model` file or the directory that holds `tokenizer.model`."""
        file = Path(path) / "tokenizer.model" if Path(path).is_dir() else Path(path)
        if not file.exists() and file.with_suffix(".json").exists():
            file = file.with_suffix(".json")  # the error says what reads it
        return cls(read_file(file, "`tokenizer_model`"), origin=str(path), flag=flag)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        return [np.array(self._backend.EncodeAsIds(text), np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._backend.DecodeIds([int(i) for i in ids if i != self.eod_id]))

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.model": self._model}

    def token_bytes(self) -> NDArray[np.int32] | None:
        if not _keeps_text(self):
            return None
        special = (self._backend.IsControl, self._backend.IsUnknown, self._backend.IsUnused)
        counts = np.zeros(self.vocab_size, np.int32)
        for index in range(self.vocab_size):
            if not any(test(index) for test in special):
                counts[index] = _piece_bytes(self._backend.IdToPiece(index))
        return counts
