"""From flags to a tokenizer, from a tokenizer to a checkpoint, and back."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megalite.config import TOKENIZERS, DataConfig
from megalite.data.beside import files_beside
from megalite.data.subword import GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, read_file
from megalite.data.tokenizer import CHARS_FILE, ByteTokenizer, CharTokenizer, NullTokenizer, Tokenizer
from megalite.errors import DataError

DESCRIPTION_FILE = "megalite_tokenizer.json"


def make_tokenizer(
    kind: str,
    *,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    texts: Callable[[], Iterable[str]] | None = None,
    flag: str | None = None,
) -> Tokenizer:
    """Make the tokenizer that `--tokenizer-type` and its companions name.

    kind: value of `--tokenizer-type`.
    vocab_size: `--vocab-size`; NullTokenizer needs it, the others only check it (`resolve_vocab_size`).
    texts: gives the whole text of the corpus, from which CharTokenizer builds its vocabulary.
    flag: what asked for it, where that is not `--tokenizer-type`, for the error about a missing package.
    Raises ConfigError where the kind's package is not installed, DataError where a file is missing or not what the
    kind needs.
    """
    if kind not in TOKENIZERS:
        raise DataError(f"`tokenizer_type`={kind}: unknown; choose {', '.join(TOKENIZERS[:-1])} or {TOKENIZERS[-1]}")
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        if vocab_size is None:
            raise DataError("`tokenizer_type`=NullTokenizer: the number of ids is not known; give `vocab_size`")
        return NullTokenizer(vocab_size)
    if kind == "CharTokenizer":
        return _char_tokenizer(tokenizer_model, texts)
    made: Tokenizer
    if kind == "GPT2BPETokenizer":
        made = _gpt2_tokenizer(tokenizer_model, vocab_file, merge_file)
    elif tokenizer_model is None:
        file = "a tokenizer.json or its directory" if kind == "HuggingFaceTokenizer" else "a sentencepiece .model file"
        raise DataError(f"`tokenizer_type`={kind}: no file given; name {file} by `tokenizer_model`")
    elif kind == "HuggingFaceTokenizer":
        made = HuggingFaceTokenizer.from_path(tokenizer_model)
    else:
        made = SentencePieceTokenizer.from_path(tokenizer_model, flag)
    path = Path(tokenizer_model) if tokenizer_model is not None else None
    if path is not None and (path.is_dir() or path.name in made.files()):  # a folder, or a file's usual name in one
        made.beside = files_beside(path if path.is_dir() else path.parent, but=made.files())
    return made


def _char_tokenizer(tokenizer_model: str | None, texts: Callable[[], Iterable[str]] | None) -> CharTokenizer:
    if tokenizer_model is not None:
        file = Path(tokenizer_model) / CHARS_FILE if Path(tokenizer_model).is_dir() else Path(tokenizer_model)
        return CharTokenizer.from_json(read_file(file, "`tokenizer_model`"), str(tokenizer_model))
    if texts is None:
        raise DataError(
            "`tokenizer_type`=CharTokenizer: its vocabulary is made from raw text and none is given; "
            "name a text file by `data_path` or a saved vocabulary by `tokenizer_model`"
        )
    return CharTokenizer.from_texts(texts())


def _gpt2_tokenizer(tokenizer_model: str | None, vocab_file: str | None, merge_file: str | None) -> GPT2BPETokenizer:
    if tokenizer_model is not None and vocab_file is None and merge_file is None:
        folder = Path(tokenizer_model)
        vocab_file, merge_file = str(folder / "vocab.json"), str(folder / "merges.txt")
    missing = [flag for flag, value in (("`vocab_file`", vocab_file), ("`merge_file`", merge_file)) if value is None]
    if missing:
        raise DataError(
            f"`tokenizer_type`=GPT2BPETokenizer: needs vocab.json and merges.txt; give {' and '.join(missing)}"
        )
    assert vocab_file is not None and merge_file is not None
    return GPT2BPETokenizer(
        read_file(vocab_file, "`vocab_file`"),
        read_file(merge_file, "`merge_file`"),
        vocab_name=vocab_file,
        merges_name=merge_file,
    )


def tokenizer_from_config(
    cfg: DataConfig,
    *,
    vocab_size: int | None = None,
    texts: Callable[[], Iterable[str]] | None = None,
    default: str = "ByteTokenizer",
) -> Tokenizer:
    """The tokenizer of a data section; `default` is the kind where `--tokenizer-type` is unset."""
    kind = cfg.tokenizer_type
    if kind is None and (cfg.vocab_file or cfg.merge_file):
        kind = "GPT2BPETokenizer"
    elif kind is None and cfg.tokenizer_model:
        kind = "SentencePieceTokenizer" if cfg.tokenizer_model.endswith(".model") else "HuggingFaceTokenizer"
    return make_tokenizer(
        kind or default,
        tokenizer_model=cfg.tokenizer_model,
        vocab_file=cfg.vocab_file,
        merge_file=cfg.merge_file,
        vocab_size=vocab_size,
        texts=texts,
        flag=None if cfg.tokenizer_type else f"`tokenizer_model`={cfg.tokenizer_model}",
    )


def resolve_vocab_size(tokenizer: Tokenizer, vocab_size: int | None) -> int:
    """The model's vocabulary before padding: the tokenizer's, or a larger `--vocab-size`. DataError for a smaller."""
    if vocab_size is None:
        return tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"`vocab_size`={vocab_size}: {tokenizer.kind} has {tokenizer.vocab_size} tokens, more than that; "
            f"omit it or give at least {tokenizer.vocab_size}"
        )
    return vocab_size


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Files for a checkpoint: the tokenizer's own, those beside it, and one that says what they are, for
    `load_tokenizer`."""
    said = json.dumps(description_of(tokenizer), indent=1) + "\n"
    return {DESCRIPTION_FILE: said.encode(), **tokenizer.beside, **tokenizer.files()}


def description_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a file says of a tokenizer, for `read_description`."""
    named = {"tokenizer_type": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "eod_id": tokenizer.eod_id}
    return {"version": 1, **named}


def load_tokenizer(directory: str | Path, flag: str | None = None) -> Tokenizer:
    """Rebuild the tokenizer from a directory that holds `tokenizer_files`; `flag` led to it.

    Raises ConfigError without its package, DataError where there is no tokenizer, or another one than it says.
    """
    folder = Path(directory)
    file = folder / DESCRIPTION_FILE
    if not file.is_file():
        raise DataError(
            f"{folder}: holds no tokenizer ({DESCRIPTION_FILE} not found); give `tokenizer_type` and its files"
        )
    kind, vocab_size = read_description(file.read_bytes(), str(file))
    model = None if kind in ("ByteTokenizer", "NullTokenizer") else str(folder)
    tokenizer = make_tokenizer(kind, tokenizer_model=model, vocab_size=vocab_size, flag=flag)
    if tokenizer.vocab_size != vocab_size:
        raise DataError(f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, its description says {vocab_size}")
    return tokenizer


def read_description(raw: bytes, where: str) -> tuple[str, int]:
    """Kind and number of ids from the content of DESCRIPTION_FILE. Raises DataError."""
    try:
        description = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a tokenizer description ({str(error)[:80]})") from None
    named = description if isinstance(description, dict) else {}
    kind, vocab_size = named.get("tokenizer_type"), named.get("vocab_size")
    if not isinstance(kind, str) or type(vocab_size) is not int or not 0 < vocab_size < 2**40:
        found = f"tokenizer_type {str(kind)[:40]!r}, vocab_size {str(vocab_size)[:40]}"
        raise DataError(f"{where}: not a tokenizer description ({found})")
    return kind, vocab_size
