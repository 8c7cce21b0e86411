"""Tokens of an interrupted `preprocess`, kept for the next one.

    PREFIX.bin.partial   tokens, which become PREFIX.bin
    PREFIX.partial       settings, then a line for each unit: its documents, and a digest of what was read and written

A unit is taken over where it reads as it did then and its tokens stand as they were written. From the first that does
not on, everything is tokenised again, so neither another text nor a torn write can enter.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalite.data.cache import digest_of
from megalite.data.file_chunks import InputUnit, unit_digest
from megalite.data.indexed import IndexedWriter
from megalite.errors import DataError
from megalite.files import take_lock

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnitTokens:
    """Tokens of one unit: for each field the ids back to back and the length of every document."""

    ids: list[NDArray[np.integer]]
    lengths: list[NDArray[np.int32]]
    text_bytes: int
    skipped: int  # broken lines that were left out
    source: str  # digest of what was read
    # Told once, and not kept: why the first lines were left out, unusual roles of messages, and conversations whose
    # calls of tools the template leaves out.
    reasons: tuple[str, ...] = ()
    roles: frozenset[str] = frozenset()
    lost_calls: int = 0

    def digest(self) -> str:
        """Hex digest of everything in it."""
        arrays = [np.ascontiguousarray(array).tobytes() for array in (*self.ids, *self.lengths)]
        return digest_of(self.source, self.text_bytes, self.skipped, *arrays)


class KeptUnits:
    """The units that are in partial files, for one writer at a time; a context around the writers of `prefixes`.

    settings: of the tokeniser; what was kept under others is dropped.
    skip_bad_lines: units from which broken lines were left out may be taken over.
    advises: says after an error that the same command continues.
    Raises DataError where another process writes the same prefix, or nothing can be written there.
    """

    def __init__(self, prefixes: Sequence[str], settings: str, *, skip_bad_lines: bool, advises: bool = True) -> None:
        self._prefixes, self._skip_bad_lines, self._advises = prefixes, skip_bad_lines, advises
        self._paths = [Path(f"{prefix}.partial") for prefix in prefixes]  # the first is used, the others are locks
        self._settings = f"{settings}\n".encode()
        self._files: list[BinaryIO] = []
        self.tokens = 0

    def __enter__(self) -> KeptUnits:
        for prefix, path in zip(self._prefixes, self._paths, strict=True):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files.append(open(path, "a+b"))  # noqa: SIM115 (closed at the exit)
            except OSError as error:
                self._close()
                raise DataError(f"{prefix}.bin: cannot be written ({error.strerror}); name another folder") from None
            if not _locked(self._files[-1], path):
                self._close()
                raise DataError(
                    f"`output_prefix`: another process writes {prefix}.bin; wait for it, or name another prefix"
                )
        self._file = self._files[0]
        self._file.seek(0)
        if self._file.readline() != self._settings:
            self._file.truncate(0)
            with contextlib.suppress(OSError):
                self._file.write(self._settings)
                self._file.flush()
        return self

    def _close(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()

    def find(self, unit: InputUnit, writers: Sequence[IndexedWriter]) -> UnitTokens | None:
        """The tokens of the next unit, which are in the writers' files; None if they are not: what follows in
        the files is cut off.
        """
        at = self._file.tell()
        try:
            entry = json.loads(self._file.readline())
            lengths = [np.array(column, np.int32) for column in entry["lengths"]]
            counts = [int(column.sum(dtype=np.int64)) for column in lengths]
            ids = [writer.following(count) for writer, count in zip(writers, counts, strict=True)]
            result = UnitTokens(ids, lengths, int(entry["bytes"]), int(entry["skipped"]), unit_digest(unit))
            if result.digest() == entry["digest"] and (self._skip_bad_lines or not result.skipped):
                self.tokens += sum(counts)
                return result
        except (ValueError, KeyError, TypeError, OverflowError):
            pass  # none is noted, or a write was torn
        self._file.truncate(at)
        for writer in writers:
            writer.cut()
        return None

    def add(self, result: UnitTokens, writers: Sequence[IndexedWriter]) -> None:
        """Note a unit that was written."""
        for writer in writers:
            writer.flush()
        self.tokens += sum(ids.size for ids in result.ids)
        entry = {
            "lengths": [lengths.tolist() for lengths in result.lengths],
            "bytes": result.text_bytes,
            "skipped": result.skipped,
            "digest": result.digest(),
        }
        with contextlib.suppress(OSError):  # a full disk: the next write of tokens says so
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.tokens:
            if self._advises:
                logger.warning("%s: what was tokenised is kept; the same command continues from it", self._paths[0])
            unused = self._paths[1:]
        else:
            unused = [*self._paths, *(Path(f"{prefix}.bin.partial") for prefix in self._prefixes)]
        for path in unused:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self._close()


def _locked(file: BinaryIO, path: Path) -> bool:
    if not (taken := take_lock(file)):
        return taken is None
    try:  # not where the one who held it has finished and removed the file
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
