"""Input files as units of work of a few megabytes each.

A plain JSONL file is cut by byte ranges that its reader finds by itself, so nothing but two numbers travels to a
worker. A text file is one document; it is cut after newlines that stand between two non-space characters, where no
tokenizer that says so joins text.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.data.cache import digest_of
from megalite.data.corpus import JSONL_SUFFIXES, check_characters, open_bytes, open_text, parse_fields
from megalite.errors import DataError
from megalite.extras import optional_package
from megalite.strangers import open_dataset

UNIT_BYTES = 1 << 21

REASONS = 3
"""Lines left out of a unit of which it is told why."""


@dataclass(frozen=True)
class InputUnit:
    """A piece of input: a byte range `start:stop` of a JSONL file, or `lines` of one from number `first_line` on, or
    `columns`, texts per field."""

    place: str  # path, for messages
    input_bytes: int  # its share of the input, for progress
    start: int = 0
    stop: int = 0
    lines: list[str] = field(default_factory=list)
    first_line: int = 0
    columns: list[list[str]] | None = None
    goes_on: bool = False  # its last document continues in the next unit

    def content(self) -> bytes:
        """The bytes of its range."""
        with open(self.place, "rb") as file:
            file.seek(self.start)
            return file.read(self.stop - self.start)


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def text_pieces(text: str, size: int) -> Iterator[str]:
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


def document_units(documents: Iterable[str], *, cuts: bool) -> Iterator[InputUnit]:
    """Documents in memory as units; with `cuts` a long one continues from unit to unit."""
    texts: list[str] = []
    held = 0
    for document in documents:
        pieces = list(text_pieces(document, UNIT_BYTES // 2)) if cuts else [document]
        for number, piece in enumerate(pieces, 1):
            texts.append(piece)
            held += utf8_length(piece)
            if number < len(pieces) or held >= UNIT_BYTES:
                yield InputUnit("", held, columns=[texts], goes_on=number < len(pieces))
                texts, held = [], 0
    if texts:
        yield InputUnit("", held, columns=[texts])


def input_size(inputs: Sequence[str]) -> int:
    """Bytes of all input files; 0 if one of them is not a file (no estimate is possible then)."""
    sizes = [os.path.getsize(path) if os.path.isfile(path) else 0 for path in inputs]
    return sum(sizes) if all(sizes) else 0


def input_units(path: str, keys: Sequence[str]) -> Iterator[InputUnit]:
    """The units of one input, in order. Raises DataError where it is not there or cannot be read."""
    if path.startswith("hf:") or os.path.isdir(path):
        return _dataset_units(path, keys)
    if not os.path.isfile(path):
        raise DataError(f"`input`={path}: no such file")
    if path.endswith(".parquet"):
        return _parquet_units(path, keys)
    if path.endswith((".gz", ".zst")) and path.endswith(JSONL_SUFFIXES):
        return _packed_units(path)
    if path.endswith(JSONL_SUFFIXES):
        return _range_units(path)
    return _text_units(path)


def _range_units(path: str) -> Iterator[InputUnit]:
    """Byte ranges that end after a newline."""
    size = os.path.getsize(path)
    with open_bytes(path, "`input`") as file:
        start = 0
        while start < size:
            file.seek(min(start + UNIT_BYTES, size) - 1)
            file.readline()
            stop = file.tell()
            yield InputUnit(path, stop - start, start=start, stop=stop)
            start = stop


def _packed_units(path: str) -> Iterator[InputUnit]:
    try:
        with open_text(path, "`input`") as file:
            lines: list[str] = []
            held, first = 0, 1
            for number, line in enumerate(file, 1):
                lines.append(line)
                held += len(line)
                if held >= UNIT_BYTES:
                    yield InputUnit(path, 0, lines=lines, first_line=first)
                    lines, held, first = [], 0, number + 1
            yield InputUnit(path, os.path.getsize(path), lines=lines, first_line=first)
    except Exception as error:
        # zstandard has its own error type, which cannot be named without the package.
        if not isinstance(error, OSError | EOFError | UnicodeDecodeError) and type(error).__name__ != "ZstdError":
            raise
        raise DataError(f"`input`={path}: cannot be unpacked ({error})") from None


def _text_units(path: str) -> Iterator[InputUnit]:
    """One document in pieces of about a unit."""
    try:
        with open_text(path, "`input`") as file:
            rest = ""
            while block := file.read(UNIT_BYTES):
                *pieces, rest = text_pieces(rest + block, UNIT_BYTES // 2)
                for piece in pieces:
                    yield InputUnit(path, len(piece.encode()), columns=[[piece]], goes_on=True)
            yield InputUnit(path, len(rest.encode()), columns=[[rest]])
    except UnicodeDecodeError as error:
        raise DataError(
            f"`input`={path}: not UTF-8 text ({error.reason} at byte {error.start} of a block); convert it"
        ) from None


def _parquet_units(path: str, keys: Sequence[str]) -> Iterator[InputUnit]:
    parquet = optional_package(f"`input`={path}", "pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # the package has a family of its own
        raise DataError(f"`input`={path}: not a parquet file ({error})") from None
    _check_columns(path, keys, file.schema_arrow.names)
    rows = max(file.metadata.num_rows, 1)
    size = os.path.getsize(path)
    for batch in file.iter_batches(batch_size=1024, columns=list(keys)):
        columns = [_texts(path, key, batch.column(key).to_pylist()) for key in keys]
        yield InputUnit(path, int(size * batch.num_rows / rows), columns=columns)


def _dataset_units(path: str, keys: Sequence[str]) -> Iterator[InputUnit]:
    """Of a folder written by `datasets.save_to_disk`, or of `hf:NAME[:CONFIG][@SPLIT]`: what `datasets.load_dataset`
    finds under that name, streamed; SPLIT is else train."""
    if path.startswith("hf:"):
        name, _, split = path[3:].partition("@")
        name, _, config = name.partition(":")
        data = open_dataset(path, "`input`", (name, config or None, split or "train"))
    elif any((Path(path) / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
        data = open_dataset(path, "`input`")
    else:
        raise DataError(f"`input`={path}: is a folder without a saved data set; name its files")
    for part in data.values() if isinstance(data, dict) else [data]:
        if part.column_names is not None:
            _check_columns(path, keys, part.column_names)
        for batch in part.iter(batch_size=1024):
            _check_columns(path, keys, list(batch))
            yield InputUnit(path, 0, columns=[_texts(path, key, batch[key]) for key in keys])


def _check_columns(path: str, keys: Sequence[str], names: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            raise DataError(f"`input`={path}: no column '{key}' (has: {', '.join(list(names)[:8])}); use `json_keys`")


def _texts(path: str, key: str, values: list[Any]) -> list[str]:
    for value in values:
        if value is not None and not isinstance(value, str):
            raise DataError(f"`input`={path}: column '{key}' is not text but {type(value).__name__}; use `json_keys`")
        check_characters(value or "", f"`input`={path}: column '{key}'")
    return [value or "" for value in values]


def unit_digest(unit: InputUnit) -> str:
    """Hex digest of what a unit reads."""
    return digest_of(unit.content() if unit.stop else b"", unit.lines, unit.columns, unit.goes_on)


def read_unit(
    unit: InputUnit,
    keys: Sequence[str],
    *,
    skip_bad_lines: bool,
    parse: Callable[[str | bytes, Sequence[str], str], list[Any]] = parse_fields,
) -> tuple[list[list[Any]], list[str], list[int]]:
    """Texts of a unit (or what `parse` makes of its lines), one list per key; for each line that was left out why, with
    its place (empty beyond the first `REASONS`); and which lines the others are, for `place_of`."""
    if unit.columns is not None:
        return unit.columns, [], []
    rows: list[list[Any]] = []
    skipped: list[str] = []
    numbers: list[int] = []
    lines: Sequence[str | bytes] = unit.content().split(b"\n") if unit.stop else unit.lines
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            rows.append(parse(line, keys, ""))
            numbers.append(number)
        except DataError as error:
            if not skip_bad_lines:
                parse(line, keys, place_of(unit, number))  # once more, now that its number is worth counting
            skipped.append(f"{place_of(unit, number)}{error}" if len(skipped) < REASONS else "")
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in keys], skipped, numbers


def place_of(unit: InputUnit, number: int) -> str:
    """File and line of the line `number` (from 0) of a unit."""
    first, left = unit.first_line or 1, unit.start
    with open(unit.place, "rb") as file, contextlib.suppress(OSError):
        while left > 0 and (block := file.read(min(left, 1 << 22))):
            first += block.count(b"\n")
            left -= len(block)
    return f"{unit.place}:{first + number}"
