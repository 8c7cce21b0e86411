"""Verified reads of what a checkpoint holds, from a disk or from a store.

The chain of trust begins with COMMITTED (`format.py`). A disk is read at once into its place.
"""

import errno
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

import xxhash

from megalite.checkpoint.format import (
    COMMITTED,
    FORMAT,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    VERSION,
    Manifest,
    StoredFile,
    StoredShard,
    checksum,
    parse_manifest,
    proves,
)
from megalite.checkpoint.remote import attempt_place, read_proven
from megalite.errors import CheckpointError
from megalite.stores import REREADS, Missing, Place, RangesAhead, StoreUrl

_READ_BYTES = 2**18  # hashing and copying alternate in pieces that stay in the processor's cache


class ShardReader:
    """Verified reads from one safetensors file of a checkpoint. Raises CheckpointError naming the file."""

    def __init__(self, path: Path, stored: StoredFile, block_bytes: int) -> None:
        self._path, self._stored, self._block_bytes = path, stored, block_bytes
        self._fd = open_plain(path, stored.nbytes)
        try:
            self.check_header()
        except BaseException:
            os.close(self._fd)
            raise

    def check_header(self) -> None:
        """Verifies the header; of a file on a disk that is done when it is opened."""
        header = bytearray(self._stored.header_bytes)
        self.read(0, memoryview(header), self._stored.header_checksum, "header")

    def read_block(self, shard: StoredShard, index: int, into: memoryview) -> None:
        """Fills `into` with block `index` of the rectangle and verifies it."""
        self.read(shard.begin + index * self._block_bytes, into, shard.checksums[index], shard.tensor)

    def expect(self, places: Iterable[tuple[StoredShard, int, int]]) -> None:
        """Says which blocks will be read, as (rectangle, index, bytes) in file order: a disk needs no word."""

    def read(self, at: int, into: memoryview, expected: str, what: str) -> None:
        digest = xxhash.xxh3_64()
        end = at + len(into)
        while at < end:
            try:
                count = os.preadv(self._fd, [into[: _READ_BYTES - at % _READ_BYTES]], at)
            except OSError as error:
                advice = "load an older checkpoint with `ckpt_step`"
                raise CheckpointError(f"{self._path}: {_reason(error)}; {advice}") from None
            if count == 0:
                raise CheckpointError(f"{self._path}: file ends early; the checkpoint is damaged")
            digest.update(into[:count])
            into, at = into[count:], at + count
        if digest.hexdigest() != expected:
            raise _damaged(self._path, what, digest.hexdigest(), expected)

    def close(self) -> None:
        os.close(self._fd)


class RemoteShardReader(ShardReader):
    """... of an object in a store: by ranges, those that are expected several at a time and ahead."""

    def __init__(self, url: StoreUrl, stored: StoredFile, block_bytes: int) -> None:
        self._url, self._stored, self._block_bytes = url, stored, block_bytes
        self._ahead = RangesAhead(url)

    def expect(self, places: Iterable[tuple[StoredShard, int, int]]) -> None:
        begins = [(shard.begin + index * self._block_bytes, nbytes) for shard, index, nbytes in places]
        self._ahead.expect((at, at + nbytes) for at, nbytes in begins)

    def read(self, at: int, into: memoryview, expected: str, what: str) -> None:
        found = ""
        for _ in range(REREADS):  # what was damaged on the way is whole in the store
            into[:] = self._ahead.read(at, at + len(into))
            found = checksum(into)
            if found == expected:
                return
        raise _damaged(self._url, what, found, expected)

    def close(self) -> None:
        self._ahead.close()


def open_shard_file(path: Place, stored: StoredFile, block_bytes: int) -> ShardReader:
    """The reader of one safetensors file, wherever it is. Raises CheckpointError."""
    if isinstance(path, StoreUrl):
        return RemoteShardReader(path, stored, block_bytes)
    return ShardReader(path, stored, block_bytes)


def files_of(path: Place, manifest: Manifest) -> Place:
    """Where the files of a checkpoint are."""
    return attempt_place(path, manifest.save_id) if isinstance(path, StoreUrl) else path


def _damaged(path: Place, what: str, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: damaged at {what} (checksum {found}, expected {expected}); load an older checkpoint with `ckpt_step`"
    )


def check_size(path: Place, nbytes: int) -> None:
    """Raises CheckpointError where a file is missing, or has another size."""
    if not isinstance(path, StoreUrl):
        os.close(open_plain(path, nbytes))
        return
    try:
        found = path.store.size(path.key)
    except Missing:
        raise CheckpointError(f"{path}: missing; the checkpoint is damaged") from None
    if found != nbytes:
        raise CheckpointError(f"{path}: {found} bytes, expected {nbytes}; the checkpoint is damaged")


def open_plain(path: Path, nbytes: int | None = None) -> int:
    """A descriptor of a plain file (no symbolic link) of exactly `nbytes`. Raises CheckpointError otherwise."""
    try:
        # not blocking: to open a pipe for reading waits for a writer
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        advice = "; the checkpoint is damaged" if error.errno in (errno.ENOENT, errno.ELOOP, errno.EIO) else ""
        if isinstance(error, PermissionError):
            advice = "; the checkpoint may be whole, give this user the right to read it"
        raise CheckpointError(f"{path}: {_reason(error)}{advice}") from None
    found, problem = os.fstat(fd), None
    if not stat.S_ISREG(found.st_mode):
        problem = "not a plain file"
    elif nbytes is not None and found.st_size != nbytes:
        problem = f"{found.st_size} bytes, expected {nbytes}"
    if problem:
        os.close(fd)
        raise CheckpointError(f"{path}: {problem}; the checkpoint is damaged")
    return fd


def _reason(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"


def read_small(path: Path, limit: int, nbytes: int | None = None) -> bytes:
    """The content of a plain file of at most `limit` bytes."""
    fd = open_plain(path, nbytes)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size > limit:
            raise CheckpointError(f"{path}: {size} bytes, at most {limit} are read; the checkpoint is damaged")
        return file.read(limit)


def read_manifest(path: Place) -> Manifest:
    """The proven manifest of a committed checkpoint. Raises CheckpointError where it is not committed or damaged."""
    if isinstance(path, StoreUrl):
        raw, save_id = read_proven(path)
        return parse_manifest(raw, f"{attempt_place(path, save_id) / MANIFEST}")
    if not os.path.isdir(path):
        raise CheckpointError(f"{path}: no such checkpoint directory")
    if not os.path.exists(path / COMMITTED):
        raise CheckpointError(f"{path}: not a committed checkpoint (no {COMMITTED} file)")
    proof = read_small(path / COMMITTED, 4096)
    raw = read_small(path / MANIFEST, MAX_MANIFEST_BYTES)
    if not proves(proof, raw):
        newer = re.match(rb"%s (\d{1,5})\s" % FORMAT.encode(), proof)
        if newer and int(newer[1]) > VERSION:
            raise CheckpointError(
                f"{path}: format v{int(newer[1])}, this megalite reads <= v{VERSION}; upgrade megalite"
            )
        raise CheckpointError(f"{path / MANIFEST}: does not match {COMMITTED}; one of the two is damaged")
    return parse_manifest(raw, str(path / MANIFEST))


def copy_extras(path: Place, manifest: Manifest, into: Path) -> None:
    """Writes verified copies of all files that travel with the weights."""
    for name in manifest.extra_files:
        (into / name).write_bytes(read_extra(path, manifest, name))


def read_extra(path: Place, manifest: Manifest, name: str) -> bytes:
    """A verified file that travels with the weights."""
    entry = manifest.extra_files.get(name)
    if entry is None:
        raise CheckpointError(f"{path}: holds no file {name!r} (has: {', '.join(manifest.extra_files) or 'none'})")
    where, data = files_of(path, manifest) / name, b""
    for _ in range(REREADS if isinstance(where, StoreUrl) else 1):
        if isinstance(where, StoreUrl):
            check_size(where, entry.nbytes)
            data = where.store.read(where.key, 0, entry.nbytes)
        else:
            data = read_small(where, entry.nbytes, entry.nbytes)
        if checksum(data) == entry.checksum:
            return data
    raise CheckpointError(f"{where}: damaged (checksum {checksum(data)}, expected {entry.checksum})")
