"""Bytes on disk: streaming safetensors files, the atomic directory.

The commit protocol, in this order:

    mkdir    iter_0000100.tmp-<id>/
    write    rank_*.safetensors (created with O_EXCL, streamed, fsynced), extra files
    write    manifest.json, then COMMITTED, which proves it; fsync both and the directory
    rename   to iter_0000100/; fsync the parent

A directory without `.tmp-` in its name is therefore whole; a kill at any instant leaves an older checkpoint as it was.
No host buffer here is larger than one block.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from megalite.checkpoint.format import (
    COMMITTED,
    DTYPE_NAMES,
    MANIFEST,
    MAX_HEADER_BYTES,
    Manifest,
    StoredFile,
    StoredShard,
    checksum,
    commit_text,
    to_json,
)
from megalite.comm import TensorShard, range_to_rectangles
from megalite.errors import CheckpointError
from megalite.inventory import Box

# Hashing and copying alternate in pieces that stay in the processor's cache: memory is touched once, not twice. Long
# writes that end where a multiple of their length ends, and values that begin on a page, are kept by the system in
# larger units, and read faster.
_WRITE_BYTES, _PAGE = 2**20, 4096


def flat_bytes(values: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it. Not by `Tensor.numpy`, after which a storage can never be
    resized again: masters kept as remainders come and go."""
    flat = values.detach().reshape(-1).view(torch.uint8)
    if not flat.numel():
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    array.tensor = flat  # type: ignore[attr-defined]  # ours: alive as long as the view
    return memoryview(array).cast("B")


def byte_blocks(values: Tensor, block_bytes: int) -> Iterator[memoryview]:
    """The bytes of a tensor of any strides on any device, row-major, in blocks, each valid until the next is asked for:
    shared with the tensor where possible, otherwise gathered into one buffer of a block."""
    values = values.detach()
    if values.device.type == "cpu" and values.is_contiguous():
        raw = flat_bytes(values)
        for start in range(0, len(raw), block_bytes):
            yield raw[start : start + block_bytes]
        return
    per_block = block_bytes // values.element_size()
    gathered = torch.empty(min(per_block, values.numel()), dtype=values.dtype)
    whole = Box((0,) * values.ndim, ())
    for start in range(0, values.numel(), per_block):
        end = min(start + per_block, values.numel())
        at = 0
        for box in range_to_rectangles(tuple(values.shape), start, end):
            gathered[at : at + box.numel].view(box.shape).copy_(values[box.slices_in(whole)])
            at += box.numel
        yield flat_bytes(gathered[: end - start])


def _header(parts: Sequence[TensorShard], save_id: str) -> bytes:
    """safetensors: the length in 8 bytes, then a JSON object with dtype, shape and data range of every tensor. Its name
    there is the logical one, with its place where it is not the whole tensor."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "save_id": save_id}}
    at = 0
    for part in parts:
        shape, end = tuple(part.local.shape), at + part.local.nbytes
        name = part.name if shape == part.global_shape else f"{part.name}{part.box}"
        entries[name] = {"dtype": DTYPE_NAMES[part.local.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _PAGE)
    if len(text) + 8 > MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(parts)} rectangles need a header of {len(text)} bytes, above safetensors' limit")
    return len(text).to_bytes(8, "little") + text


def write_shard_file(
    path: Path,
    parts: Sequence[TensorShard],
    *,
    save_id: str,
    block_bytes: int,
    on_half: Callable[[], None] | None = None,
) -> StoredFile:
    """Streams the parts into a new file and syncs it. Returns its manifest entry. `on_half` is called once, when half
    of the parts are written. Raises OSError (disk full, no permission, file exists)."""
    # Widest first keeps every tensor aligned for readers that map.
    parts = sorted(parts, key=lambda part: -part.local.element_size())
    header = _header(parts, save_id)
    shards: list[StoredShard] = []
    with NewFile(path) as file:
        file.write(memoryview(header))
        at = len(header)
        for number, part in enumerate(parts):
            if on_half is not None and number == len(parts) // 2:
                on_half()
            checksums = tuple(file.write(block) for block in byte_blocks(part.local, block_bytes))
            shards.append(StoredShard(part.name, part.box, at, checksums))
            at += part.local.nbytes
    return StoredFile(at, len(header), checksum(header), tuple(shards))


def write_file(path: Path, data: bytes) -> str:
    """Writes and syncs a new small file; returns its checksum."""
    with NewFile(path) as file:
        return file.write(memoryview(data))


class NewFile:
    """A file that must not exist yet; synced when it is closed without an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._synced = False
        self._at = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, block: memoryview) -> str:
        """Appends the block and returns its checksum."""
        digest = xxhash.xxh3_64()
        while block:
            piece = block[: _WRITE_BYTES - self._at % _WRITE_BYTES]
            block = block[len(piece) :]
            self._at += len(piece)
            digest.update(piece)
            while piece:
                piece = piece[self._named(os.write, piece) :]
        return digest.hexdigest()

    def sync(self) -> None:
        """Makes what was written durable."""
        self._named(os.fsync)
        self._synced = True

    def _named(self, call: Callable[..., Any], *args: Any) -> Any:
        """A system call on the descriptor whose error names the file."""
        try:
            return call(self._fd, *args)
        except OSError as error:
            error.filename = str(self._path)
            raise

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self._synced:
                self.sync()
        finally:
            os.close(self._fd)


def fsync_directory(path: Path) -> None:
    """Makes the names inside a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_proof(staging: Path, manifest: Manifest) -> None:
    """manifest.json, then COMMITTED, then the directory: all durable."""
    raw = to_json(manifest)
    with NewFile(staging / MANIFEST) as first, NewFile(staging / COMMITTED) as second:
        first.write(memoryview(raw))
        second.write(memoryview(commit_text(raw)))
        # At once: a journalling file system then commits once instead of three times. The order does not matter
        # before the rename.
        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(call) for call in (first.sync, second.sync, partial(fsync_directory, staging))]:
                done.result()


def publish(staging: Path, final: Path) -> None:
    """Gives the staged directory its name, durably. Never replaces anything."""
    if final.exists():
        raise FileExistsError(17, "exists already and is never overwritten", str(final))
    os.rename(staging, final)
    fsync_directory(final.parent)
