"""The format on disk: names, the manifest and its validation, checksums.

The chain of trust: `COMMITTED` proves the manifest, the manifest proves every byte of every other file. A rectangle's
bytes are checksummed in blocks of `block_bytes`, so a rank can verify a slice without reading the rest. Everything here
is JSON and safetensors: reading a checkpoint never executes anything.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import xxhash

from megalite.errors import CheckpointError
from megalite.inventory import Box, find_overlap

FORMAT = "megalite-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
BLOCK_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 100 * 2**20
MAX_MANIFEST_BYTES = 512 * 2**20

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_FILE_NAME = re.compile(r"[\w-][\w.-]{0,199}", re.ASCII)
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_MAX_EXTENT = 2**62


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor of the checkpoint: safetensors' dtype name and the shape without padding."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class StoredShard:
    """A rectangle of `tensor` at byte `begin` of its file; one checksum for each block of its bytes."""

    tensor: str
    box: Box
    begin: int
    checksums: tuple[str, ...]


@dataclass(frozen=True)
class StoredFile:
    """A safetensors file: its size, its header (length prefix included) and its rectangles in file order."""

    nbytes: int
    header_bytes: int
    header_checksum: str
    shards: tuple[StoredShard, ...]


@dataclass(frozen=True)
class ExtraFile:
    """A file that travels with the weights, e.g. a tokenizer."""

    nbytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """Contents of a committed checkpoint. `meta` is the saver's JSON object (scalars, configuration, data position)."""

    step: int
    save_id: str
    world_size: int
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    extra_files: Mapping[str, ExtraFile] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def shards_by_tensor(self) -> dict[str, list[tuple[str, StoredShard]]]:
        """name -> [(file name, rectangle)]."""
        table: dict[str, list[tuple[str, StoredShard]]] = {}
        for file_name, stored in self.files.items():
            for shard in stored.shards:
                table.setdefault(shard.tensor, []).append((file_name, shard))
        return table


def checksum(data: bytes | bytearray | memoryview) -> str:
    """XXH3 with 64 bits, in hex: the format's only checksum (it runs at memory speed)."""
    return xxhash.xxh3_64_hexdigest(data)


def commit_text(manifest: bytes, version: int | None = None) -> bytes:
    """The exact content of COMMITTED for these manifest bytes: any other content is refused. version: None: today's."""
    version = VERSION if version is None else version
    return f"{FORMAT} {version}\nmanifest.json {len(manifest)} bytes xxh3_64 {checksum(manifest)}\n".encode()


def proves(committed: bytes, manifest: bytes) -> bool:
    """Whether COMMITTED proves a manifest of this version of the format, or of an older one."""
    return any(committed == commit_text(manifest, version) for version in range(1, VERSION + 1))


def check_file_name(name: str, where: str) -> str:
    """Returns `name` if it can only mean a plain file inside the checkpoint; else raises CheckpointError."""
    if not _FILE_NAME.fullmatch(name):
        raise CheckpointError(f"{where}: file name {name[:80]!r} is not allowed (letters, digits, '_', '-', '.')")
    return name


def structure_hash(tensors: Mapping[str, StoredTensor]) -> str:
    """Checksum of all names, dtypes and shapes: two checkpoints of the same model and optimizer have the same."""
    lines = sorted(f"{name} {t.dtype} {list(t.shape)}" for name, t in tensors.items())
    return checksum("\n".join(lines).encode())


def to_json(manifest: Manifest) -> bytes:
    """The bytes of manifest.json. Raises CheckpointError where `meta` is not JSON."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "save_id": manifest.save_id,
        "world_size": manifest.world_size,
        "structure": structure_hash(manifest.tensors),
        "block_bytes": manifest.block_bytes,
        "meta": manifest.meta,
        "tensors": {name: {"dtype": t.dtype, "shape": list(t.shape)} for name, t in manifest.tensors.items()},
        "files": {name: file_to_json(stored) for name, stored in manifest.files.items()},
        "extra_files": {n: {"bytes": e.nbytes, "checksum": e.checksum} for n, e in manifest.extra_files.items()},
    }
    try:
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint meta is not JSON: {error}") from None


def file_to_json(stored: StoredFile) -> dict[str, Any]:
    """The manifest's entry of one safetensors file (also what a rank reports to rank 0 about the file it wrote)."""
    return {
        "bytes": stored.nbytes,
        "header_bytes": stored.header_bytes,
        "header_checksum": stored.header_checksum,
        "shards": [
            {
                "tensor": shard.tensor,
                "offset": list(shard.box.offset),
                "shape": list(shard.box.shape),
                "begin": shard.begin,
                "checksums": list(shard.checksums),
            }
            for shard in stored.shards
        ],
    }


def file_from_json(value: Any, name: str, tensors: Mapping[str, StoredTensor], block_bytes: int) -> StoredFile:
    """Reads and validates what `file_to_json` writes. Raises CheckpointError."""
    return _Reader("report").file(value, name, tensors, block_bytes)


def parse_json(raw: bytes, where: str) -> Any:
    """JSON from an untrusted file: duplicate keys, nonsense and endless nesting are refused. Raises CheckpointError."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key appears twice")
        return result

    try:
        return json.loads(raw, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({str(error)[:120]}); the checkpoint is damaged") from None


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Validates manifest.json completely before anything is trusted. Raises CheckpointError naming what is wrong."""
    reader = _Reader(where)
    document = reader.mapping(parse_json(raw, where), "document")
    if document.get("format") != FORMAT:
        raise CheckpointError(f"{where}: not a megalite checkpoint (format {str(document.get('format'))[:40]!r})")
    version = reader.integer(document.get("version"), "version")
    if version > VERSION:
        raise CheckpointError(f"{where}: format v{version}, this megalite reads <= v{VERSION}; upgrade megalite")
    tensors = {
        name: reader.tensor(value, name) for name, value in reader.mapping(document.get("tensors"), "tensors").items()
    }
    block_bytes = reader.integer(document.get("block_bytes"), "block_bytes", low=4096)
    if block_bytes % 4096 or block_bytes > 2**30:
        raise reader.wrong(f"block_bytes {block_bytes}")
    files = {
        check_file_name(name, where): reader.file(value, name, tensors, block_bytes)
        for name, value in reader.mapping(document.get("files"), "files").items()
    }
    extra = {
        check_file_name(name, where): reader.extra(value, name)
        for name, value in reader.mapping(document.get("extra_files"), "extra_files").items()
    }
    if extra.keys() & files.keys() or {MANIFEST, COMMITTED} & (extra.keys() | files.keys()):
        raise reader.wrong("a file name appears twice")
    manifest = Manifest(
        step=reader.integer(document.get("step"), "step"),
        save_id=reader.text(document.get("save_id"), "save_id"),
        world_size=reader.integer(document.get("world_size"), "world_size", low=1),
        tensors=tensors,
        files=files,
        extra_files=extra,
        meta=reader.mapping(document.get("meta"), "meta"),
        block_bytes=block_bytes,
    )
    if document.get("structure") != structure_hash(tensors):
        raise reader.wrong("structure hash")
    for name, tensor in tensors.items():
        boxes = [shard.box for _, shard in manifest.shards_by_tensor.get(name, [])]
        if problem := tiling_problem(boxes, tensor.shape):
            raise CheckpointError(f"{where}: tensor {name}: {problem}")
    return manifest


def tiling_problem(boxes: Sequence[Box], shape: Sequence[int]) -> str | None:
    """None if the boxes cover a tensor of `shape` exactly once, else what is wrong."""
    total, covered = math.prod(shape), sum(box.numel for box in boxes)
    if overlap := find_overlap(boxes):
        return f"rectangles {overlap[0]} and {overlap[1]} overlap"
    if covered != total:
        return f"{total - covered} of {total} elements of shape {list(shape)} are not stored"
    return None


class _Reader:
    """Typed access to an untrusted document."""

    def __init__(self, where: str) -> None:
        self.where = where

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: damaged or hostile manifest ({what[:200]})")

    def mapping(self, value: Any, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(f"{what} is not an object")
        return value

    def text(self, value: Any, what: str) -> str:
        if not isinstance(value, str) or not 0 < len(value) < 1000:
            raise self.wrong(f"{what} is not a short text")
        return value

    def integer(self, value: Any, what: str, *, low: int = 0) -> int:
        if type(value) is not int or not low <= value < _MAX_EXTENT:
            raise self.wrong(f"{what} is not an integer >= {low}")
        return value

    def digest(self, value: Any, what: str) -> str:
        if not isinstance(value, str) or not _CHECKSUM.fullmatch(value):
            raise self.wrong(f"{what} is not a checksum")
        return value

    def extents(self, value: Any, what: str) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > 16:
            raise self.wrong(f"{what} is not a list of extents")
        for extent in value:
            self.integer(extent, what)
        return tuple(value)

    def items(self, value: Any, what: str) -> Iterable[Any]:
        if not isinstance(value, list):
            raise self.wrong(f"{what} is not a list")
        return value

    def tensor(self, value: Any, name: str) -> StoredTensor:
        entry = self.mapping(value, name)
        if not isinstance(entry.get("dtype"), str) or entry["dtype"] not in DTYPES:
            raise self.wrong(f"{name}: dtype {str(entry.get('dtype'))[:20]!r}")
        tensor = StoredTensor(entry["dtype"], self.extents(entry.get("shape"), name))
        if tensor.nbytes >= _MAX_EXTENT:
            raise self.wrong(f"{name}: shape {list(tensor.shape)}")
        return tensor

    def extra(self, value: Any, name: str) -> ExtraFile:
        entry = self.mapping(value, name)
        return ExtraFile(self.integer(entry.get("bytes"), name), self.digest(entry.get("checksum"), name))

    def file(self, value: Any, name: str, tensors: Mapping[str, StoredTensor], block_bytes: int) -> StoredFile:
        entry = self.mapping(value, name)
        nbytes = self.integer(entry.get("bytes"), name)
        header_bytes = self.integer(entry.get("header_bytes"), name, low=8)
        at = header_bytes
        shards = []
        for item in self.items(entry.get("shards"), name):
            shard = self.shard(item, name, tensors, block_bytes)
            if shard.begin != at:
                raise self.wrong(f"{name}: rectangles are not one after the other")
            at += shard.box.numel * tensors[shard.tensor].torch_dtype.itemsize
            shards.append(shard)
        if at != nbytes or header_bytes > MAX_HEADER_BYTES:
            raise self.wrong(f"{name}: sizes do not add up")
        return StoredFile(nbytes, header_bytes, self.digest(entry.get("header_checksum"), name), tuple(shards))

    def shard(self, value: Any, name: str, tensors: Mapping[str, StoredTensor], block_bytes: int) -> StoredShard:
        entry = self.mapping(value, name)
        tensor = entry.get("tensor")
        if not isinstance(tensor, str) or tensor not in tensors:
            raise self.wrong(f"{name}: rectangle of the unknown tensor {str(tensor)[:80]!r}")
        stored = tensors[tensor]
        shape = stored.shape
        box = Box(self.extents(entry.get("offset"), name), self.extents(entry.get("shape"), name))
        inside = len(box.offset) == len(box.shape) == len(shape) and all(
            start + extent <= total for start, extent, total in zip(box.offset, box.shape, shape, strict=True)
        )
        if not inside:
            raise self.wrong(f"{name}: rectangle {box.offset} {box.shape} leaves tensor {tensor} {list(shape)}")
        checksums = tuple(self.digest(c, name) for c in self.items(entry.get("checksums"), name))
        if len(checksums) != -(-box.numel * stored.torch_dtype.itemsize // block_bytes):
            raise self.wrong(f"{name}: number of checksums of {tensor}")
        return StoredShard(tensor, box, self.integer(entry.get("begin"), name), checksums)
