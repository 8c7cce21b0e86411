"""Text that is not tokenised yet: text files, JSONL, and the default corpus.

The default corpus is what every Python installation holds: the sources of its standard library, sorted, every 20th
file held out for validation. A text file is one running text, cut by characters at the borders of the split, without
any end-of-document token; each line of a JSONL file and each file of the default corpus is a document and ends with
one (if the tokenizer has one). Tokens are kept in a cache whose key is content, tokenizer and split.
"""

import contextlib
import gzip
import hashlib
import io
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from megalite.data.splits import bounds_of
from megalite.errors import DataError
from megalite.extras import optional_package

logger = logging.getLogger(__name__)

JSONL_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
# Parts of the standard library that some installations leave out, or that are tables rather than text.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "encodings", "idlelib", "lib2to3", "ensurepip", "__pycache__"}
)
HELD_OUT_EVERY = 20

SplitRange = tuple[float, float]


@dataclass(frozen=True)
class TextCorpus:
    """A text that can be cut into parts."""

    name: str  # for messages
    digest: Callable[[], str]  # of the content
    documents: Callable[[SplitRange | None, str], Iterable[str]]  # of a part (None: of all) and split
    ends_documents: bool  # whether a document ends with the end-of-document token


def stdlib_files(root: str | None = None) -> list[Path]:
    """Sources of the standard library, sorted by path: the same list on every run of one Python version.

    Raises DataError where there are none (a zipped or frozen installation).
    """
    folder = Path(root or sysconfig.get_path("stdlib"))
    found = []
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        found += [Path(where) / file for file in files if file.endswith(".py")]
    found.sort(key=lambda path: path.relative_to(folder).as_posix())
    if len(found) < HELD_OUT_EVERY:
        raise DataError(
            f"`data_path`: not given, and the default corpus is not there ({len(found)} Python sources in {folder}); "
            "name a text file or a .bin/.idx prefix by `data_path`"
        )
    return found


def stdlib_corpus() -> TextCorpus:
    """The default corpus. Validation is every 20th file, training the others; there is no test part."""
    files = stdlib_files()

    def documents(part: SplitRange | None, split: str) -> Iterator[str]:
        for number, file in enumerate(files, 1):
            held_out = number % HELD_OUT_EVERY == 0
            if part is None or (split == "valid" and held_out) or (split == "train" and not held_out):
                with contextlib.suppress(UnicodeDecodeError):
                    text = file.read_text(encoding="utf-8")
                    if text.strip():
                        yield text

    def digest() -> str:
        return xxhash.xxh3_128_hexdigest(b"".join(file.read_bytes() for file in files))

    return TextCorpus("the Python standard library", digest, documents, ends_documents=True)


def file_corpus(path: str, flag: str = "`data_path`") -> TextCorpus:
    """A text file (one running text) or a JSONL file (one document a line, field `text`)."""
    jsonl = path.endswith(JSONL_SUFFIXES)
    if path.endswith(".parquet"):
        raise DataError(f"{flag}={path}: is Parquet, not text; tools/preprocess_data.py makes a .bin/.idx pair of it")

    def documents(part: SplitRange | None, split: str) -> Iterator[str]:
        if jsonl:
            texts = [text for text in read_jsonl(path, flag) if text]
            begin, end = bounds_of(part, len(texts)) if part else (0, len(texts))
            yield from texts[begin:end]
        else:
            text = read_text(path, f"{flag}={path}", "convert it, or name a .bin/.idx prefix")
            begin, end = bounds_of(part, len(text)) if part else (0, len(text))
            if end > begin:
                yield text[begin:end]

    def digest() -> str:
        try:
            with open_bytes(path, flag) as file:
                return hashlib.file_digest(file, lambda: xxhash.xxh3_128(b"jsonl" if jsonl else b"text")).hexdigest()
        except OSError as error:
            raise DataError(f"{flag}={path}: cannot be read ({error.strerror})") from None

    return TextCorpus(path, digest, documents, ends_documents=jsonl)


def read_text(path: str, where: str, advice: str = "convert it") -> str:
    """A whole UTF-8 file, its line ends as they are. Raises DataError. where: names it in the message."""
    try:
        # newline="": characters are kept as they are, a byte of the file is a byte of the text.
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        byte = f"byte {error.start}: 0x{error.object[error.start]:02x}"
        raise DataError(f"{where}: not UTF-8 text ({byte}); {advice}") from None
    except OSError as error:
        raise DataError(f"{where}: cannot be read ({error.strerror})") from None


def open_bytes(path: str, flag: str) -> io.BufferedReader:
    """Open a file that `flag` names for reading. Raises DataError."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{flag}={path}: cannot be read ({error.strerror})") from None


@contextlib.contextmanager
def open_text(path: str, flag: str) -> Iterator[io.TextIOBase]:
    """Open a text file that `flag` names, unpacked if its name ends in `.gz` or `.zst`. Raises DataError."""
    with open_bytes(path, flag) as raw:
        binary: Any = raw
        if path.endswith(".gz"):
            binary = gzip.open(raw)  # noqa: SIM115 (closed with the text)
        elif path.endswith(".zst"):
            binary = optional_package(f"{flag}={path}", "zstandard").ZstdDecompressor().stream_reader(raw)
        with io.TextIOWrapper(binary, encoding="utf-8", newline="\n") as text:
            yield text


def read_jsonl(path: str, flag: str, key: str = "text") -> Iterator[str]:
    """Field `key` of every line of the file that `flag` names; empty lines are passed over.

    Raises DataError naming file and line where a line is not a JSON object with a text in that field.
    """
    number = 0
    try:
        with open_text(path, flag) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield parse_fields(line, (key,), f"{path}:{number}")[0]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number + 1}: not UTF-8 text ({error.reason}); convert the file") from None
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def parse_fields(line: str | bytes, keys: Sequence[str], where: str) -> list[str]:
    """Texts of the fields `keys` of one JSONL line; `where` is its place, for the error."""
    record = parse_json(line, where)
    if not isinstance(record, dict):
        raise DataError(f"{where}: not a JSON object but {type(record).__name__}; a line must be an object of fields")
    for key in keys:
        if key not in record:
            has = ", ".join(list(map(str, record))[:8]) or "no field at all"
            if key == "text" and ("messages" in record or "conversations" in record):
                raise DataError(f"{where}: a conversation; tools/preprocess_data.py --data-format chat takes it")
            raise DataError(
                f"{where}: no field '{key}' (has: {has}); tools/preprocess_data.py takes other fields by --json-keys"
            )
        if not isinstance(record[key], str):
            raise DataError(f"{where}: field '{key}' is not text but {type(record[key]).__name__}")
        check_characters(record[key], f"{where}: field '{key}'")
    return [record[key] for key in keys]


def parse_json(line: str | bytes, where: str) -> Any:
    """The value of one JSONL line. Raises DataError."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: not valid JSON ({error}); repair the line, or tools/preprocess_data.py --skip-bad-lines drops it"
        ) from None


def check_characters(text: str, where: str) -> None:
    """Raises DataError for half a character (a lone surrogate), which no encoding has: JSON can spell it."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has half a character (\\u{ord(text[error.start]):04x}, a lone surrogate, at character "
            f"{error.start}); repair the line, or tools/preprocess_data.py --skip-bad-lines drops it"
        ) from None
