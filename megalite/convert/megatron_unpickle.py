"""Opens pickles of Megatron-LM, torch and DeepSpeed for another process. A program of its own: nothing imports it.

It reads requests, one JSON object a line, from standard input, and answers each with a JSON line on standard output:

    {"open": FILE}                                 {"args": {...}, "models": [{name: [dtype, shape]}], ...}
    {"open": FILE, "model": 0, "name": NAME}       {} and the tensor's bytes
    {"metadata": FILE}                             {"tensors": {name: [dtype, shape, chunks]}, "objects": {name: place}}
    {"content": FILE, "at": [offset, length]}      {"content": the object there as plain values}; null: the whole file
    {"item": FILE, "at": [offset, length], "entry": [dtype, shape]}      {} and the tensor's bytes
    anything that goes wrong                       {"error": "one line"}

torch's weights-only unpickler calls nothing but what rebuilds tensors. Whatever else such files hold (enums of
Megatron, states of random generators and optimizers) becomes a `StandIn`, which takes any arguments and does nothing;
a name outside `PACKAGES` and `CLASSES` is refused before anything is unpickled. The `.metadata` of
torch.distributed.checkpoint is a plain pickle: its opcodes are read as text, and each class of `RECORDS` becomes a
record; nothing is imported or called.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import pickletools
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch
from torch import Tensor

# Packages that torch's unpickler judges by itself.
KNOWN_TO_TORCH = ("torch", "collections", "_codecs")
# Where the classes of a checkpoint come from; none of them is imported, a StandIn takes its place.
PACKAGES = ("megatron", "deepspeed", "apex", "fp16", "transformer_engine", "numpy")
CLASSES = ("signal.Signals", "pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath",
           "types.SimpleNamespace", "io.BytesIO", "_io.BytesIO")  # fmt: skip
ARGUMENTS = "argparse.Namespace"
# Python 3.11.0 to 3.11.3 write the member of an enum as getattr(its class, its name).
GETATTR = ("__builtin__.getattr", "builtins.getattr")
MAX_PICKLE_BYTES = 512 * 2**20
# What `.metadata` may name: module -> classes. They become records, whose fields are read and nothing else.
RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": (
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    ),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}  # fmt: skip
TORCHS = ("Size", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32",
          "int16", "int8", "uint8", "bool")  # fmt: skip
RECORD_NAMES = frozenset({f"{module}.{name}" for module, names in RECORDS.items() for name in names})
PLAIN_NAMES = RECORD_NAMES | {f"torch.{name}" for name in TORCHS} | {"torch.serialization._get_layout", *GETATTR}
LITERALS: dict[str, Any] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_DICT": dict, "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple, "BININT": int, "BININT1": int, "BININT2": int, "LONG1": int, "BINFLOAT": float,
    "BINUNICODE": str, "SHORT_BINUNICODE": str, "BINUNICODE8": str,
}  # fmt: skip
# Opcodes that put objects together -> how many of the last ones they take; None: those after the last mark.
TAKES = {"TUPLE": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "APPENDS": None, "SETITEM": 2,
         "SETITEMS": None, "REDUCE": 2, "NEWOBJ": 2, "BUILD": 1}  # fmt: skip
# torch 1.5 and older: no zip archive but four pickles (a number, a version, the machine, the object), then raw bytes.
PICKLES_OF_OLD_FILES = 4


class StandIn:
    """Takes the place of a class that is not ours to run."""

    def __new__(cls, *_: Any, **__: Any) -> StandIn:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class MegatronsOwn(StandIn):
    """Takes the place of a class of Megatron."""


class Refused(Exception):
    """A file is refused; the text says why to its owner."""


class OpenedFile:
    """The arguments and the weights of one rank's file; zip archives are mapped, not read."""

    def __init__(self, path: str) -> None:
        self.path, self.checked = path, False
        content = _loaded(path)
        if isinstance(content, Tensor) or (isinstance(content, Mapping) and "param" in content):  # DeepSpeed's
            content = {"model": {"param": content["param"] if isinstance(content, Mapping) else content}}
        if not isinstance(content, Mapping):
            raise Refused("holds no dictionary")
        keys = [key for key in ("model", *(f"model{i}" for i in range(len(content)))) if key in content]
        if not keys:
            raise Refused("holds no model; a Megatron-LM file has the key model, or model0, model1, ...")
        self.models = [dict(_flat(content[key])) for key in keys]
        arguments = content.get("args")
        self.description = {
            "args": {k: _plain(v) for k, v in vars(arguments).items()} if arguments is not None else None,
            "version": _plain(content.get("checkpoint_version", 0)),
            "iteration": _plain(content.get("iteration", 0)),
            "models": [{n: [str(t.dtype), list(t.shape)] for n, t in model.items()} for model in self.models],
        }

    def tensor(self, model: int, name: str) -> Tensor:
        """A tensor of the file. Raises Refused where the file is damaged."""
        if not self.checked:
            _check_sums(self.path)
        self.checked = True
        return self.models[model][name]


class Named(str):
    """The name of a class or function in a pickle that is read as text."""


class Record:
    """An object in such a pickle: the name of its class, what it was called with, and the state that it was given."""

    def __init__(self, name: str, arguments: Any) -> None:
        self.name, self.arguments, self.state = name, arguments, None

    def field(self, key: str) -> Any:
        """A field of a dataclass."""
        if not isinstance(self.state, Mapping) or key not in self.state:
            raise Refused(f"its .metadata holds a {self.name.rsplit('.', 1)[-1][:40]} without {key}")
        return self.state[key]


class PlainPickle:
    """Reads a pickle of records as text. Raises Refused for every name outside `PLAIN_NAMES` and every opcode that such
    a file does not need."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def load(self) -> Any:
        """The object that the pickle makes."""
        for opcode, argument, _ in pickletools.genops(self.data):
            name = opcode.name
            if name in ("PROTO", "FRAME", "STOP"):
                continue
            if name in LITERALS:
                self.stack.append(LITERALS[name]() if argument is None else argument)
            elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
                self.memo[len(self.memo) if name == "MEMOIZE" else int(str(argument))] = self.stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                self.stack.append(self.memo[int(str(argument))])
            elif name in ("GLOBAL", "STACK_GLOBAL"):
                self.stack.append(_allowed(str(argument).replace(" ", ".") if argument else ".".join(self._pop(2))))
            elif name == "MARK":
                self.marks.append(len(self.stack))
            else:
                self._make(name)
        return self.stack.pop()

    def _pop(self, count: int | None) -> list[Any]:
        """The last objects of the stack; None: those after the last mark."""
        first = self.marks.pop() if count is None else len(self.stack) - count
        found = self.stack[first:]
        del self.stack[first:]
        return found

    def _make(self, name: str) -> None:
        """The opcodes that put objects together."""
        if name not in TAKES:
            raise Refused(f"its .metadata holds the opcode {name}, which torch does not write there")
        found = self._pop(TAKES[name])
        if name.startswith("TUPLE"):
            self.stack.append(tuple(found))
        elif name.startswith("APPEND"):
            self.stack[-1] += found
        elif name.startswith("SETITEM"):
            self.stack[-1].update(zip(found[::2], found[1::2], strict=True))
        elif name != "BUILD":
            self.stack.append(_made(*found))
        elif not isinstance(self.stack[-1], Record):
            raise Refused("its .metadata gives a state to what is no record")
        else:
            self.stack[-1].state = found[0]


def _allowed(name: str) -> Named:
    if name not in PLAIN_NAMES:
        raise Refused(f"asks for {name[:80]}, which no .metadata needs; nothing of it was executed")
    return Named(name)


def _made(called: Any, arguments: Any) -> Any:
    """What a call of a pickle stands for: sizes, members of enums and paths as plain values, else a record."""
    if not isinstance(called, Named) or not isinstance(arguments, tuple):
        raise Refused("its .metadata calls what is no class")
    if called == "torch.Size":
        return tuple(arguments[0])
    if called in GETATTR and not (isinstance(arguments[0], Named) and arguments[0] in RECORD_NAMES):
        raise Refused(f"asks for {called}, which no .metadata needs but for its own enums; nothing of it was executed")
    return Record(called, arguments)


def described(metadata: Any) -> dict[str, Any]:
    """The tensors and the objects that a `.metadata` lists, with their places: file, offset, length."""
    if not isinstance(metadata, Record) or not metadata.name.endswith(".Metadata"):
        raise Refused("its .metadata is not one of torch.distributed.checkpoint")
    places: dict[tuple[str, Any], list[Any]] = {}
    for index, stored in metadata.field("storage_data").items():
        if isinstance(stored.state, Mapping) and stored.state.get("transform_descriptors"):
            raise Refused(f"{index.field('fqn')[:80]} is compressed or encrypted, which is not supported")
        place = [stored.field(key) for key in ("relative_path", "offset", "length")]
        places[index.field("fqn"), index.state.get("offset")] = place  # of an object there is none
    tensors, objects = {}, {}
    for name, entry in metadata.field("state_dict_metadata").items():
        if entry.name.endswith(".BytesStorageMetadata"):
            objects[name] = places[name, None]
            continue
        chunks = [(tuple(chunk.field("offsets")), tuple(chunk.field("sizes"))) for chunk in entry.field("chunks")]
        listed = [[offsets, sizes, *places[name, offsets]] for offsets, sizes in chunks]
        tensors[name] = [str(entry.field("properties").state[0]), entry.field("size"), listed]
    return {"tensors": tensors, "objects": objects}


def _stand_ins(path: str | io.BytesIO, archive: bool) -> Iterator[tuple[Any, str]]:
    """The objects that torch's unpickler gets for the names in a file. Raises Refused."""
    for name in set(_names(path, archive)):
        package = name.split(".")[0]
        if name == ARGUMENTS:
            yield argparse.Namespace, name
        elif name in GETATTR:
            yield member, "builtins.getattr"  # as torch reads it
        elif package in PACKAGES or name in CLASSES:
            yield MegatronsOwn if package == "megatron" else StandIn, name
        elif package not in KNOWN_TO_TORCH:
            raise Refused(f"asks for {name[:80]}, which no Megatron-LM checkpoint needs; nothing of it was executed")


def member(owner: object, name: object) -> StandIn:
    """In the place of `getattr`: a member of an enum of Megatron's. Raises Refused for anything else."""
    if not (isinstance(owner, type) and issubclass(owner, MegatronsOwn)):
        what = "asks for builtins.getattr, which no Megatron-LM checkpoint needs but for its own enums"
        raise Refused(f"{what}; nothing of it was executed")
    return owner()


def _names(path: str | io.BytesIO, archive: bool) -> Iterator[str]:
    """The classes and functions that a file's pickles name, read as text. Raises Refused."""
    if archive:
        with zipfile.ZipFile(path) as whole:
            pickles = [entry for entry in whole.infolist() if entry.filename.endswith("/data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
                raise Refused("not a file of torch.save")
            opened: IO[bytes] = io.BytesIO(whole.read(pickles[0]))
    else:
        opened = open(path, "rb") if isinstance(path, str) else io.BytesIO(path.getvalue())
    with opened as file:
        for _ in range(1 if archive else PICKLES_OF_OLD_FILES):
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name in ("GLOBAL", "INST"):
                    yield str(argument).replace(" ", ".")
                elif opcode.name == "STACK_GLOBAL":
                    raise Refused("not a pickle as torch.save writes it")


def _check_sums(path: str | io.BytesIO) -> None:
    if zipfile.is_zipfile(path) and (damaged := zipfile.ZipFile(path).testzip()) is not None:
        raise Refused(f"the checksum of {damaged[:80]} in it is wrong: the file is damaged")


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested dictionaries under names joined by dots."""
    if not isinstance(tree, Mapping):
        raise Refused("its model is not a dictionary")
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            if value.untyped_storage().nbytes() < value.numel() * value.element_size():
                raise Refused(f"{prefix}{key} claims to be larger than what the file holds")
            yield f"{prefix}{key}", value


def _plain(value: Any) -> Any:
    """A value that JSON has; tensors of one element as numbers, the others as their type's name."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return f"<{type(value).__name__}>"


def _loaded(source: str | io.BytesIO) -> Any:
    """What torch's weights-only unpickler makes of a file; archives on a disk are mapped, not read."""
    archive = zipfile.is_zipfile(source)
    allowed: list[Any] = list(_stand_ins(source, archive))
    if isinstance(source, io.BytesIO):
        source.seek(0)
    with torch.serialization.safe_globals(allowed):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=archive and isinstance(source, str))


def item(path: str, at: Sequence[int], entry: Sequence[Any]) -> Tensor:
    """The tensor of the part `at` of a file. Raises Refused where its dtype or shape is not `entry`."""
    source = io.BytesIO(_bytes_at(path, at))
    _check_sums(source)
    source.seek(0)
    values = _loaded(source)
    if not isinstance(values, Tensor):
        raise Refused(f"holds a {type(values).__name__} at {at[0]}, its .metadata says a tensor")
    if (found := [str(values.dtype), list(values.shape)]) != list(entry):
        raise Refused(f"holds {found} at {at[0]}, its .metadata says {list(entry)}")
    return values


def _bytes_at(path: str, at: Sequence[int]) -> bytes:
    offset, length = at
    if not 0 <= offset <= offset + length <= os.path.getsize(path):
        raise Refused(f"ends before {offset + length}, where its .metadata has an item: the file is not whole")
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)


def answer(request: Mapping[str, Any], files: dict[str, OpenedFile]) -> tuple[dict[str, Any], memoryview | None]:
    """The line and the bytes that answer a request; `files` keeps what is open."""
    if "metadata" in request:
        if os.path.getsize(path := request["metadata"]) > MAX_PICKLE_BYTES:
            raise Refused(f"larger than {MAX_PICKLE_BYTES >> 20} MiB, which no .metadata is")
        with open(path, "rb") as file:
            return described(PlainPickle(file.read()).load()), None
    if "content" in request:
        path, at = request["content"], request["at"]
        return {"content": _plain(_loaded(path if at is None else io.BytesIO(_bytes_at(path, at))))}, None
    if "item" in request:
        return {}, _raw(item(request["item"], request["at"], request["entry"]))
    path = request["open"]
    opened = files[path] = files.get(path) or OpenedFile(path)
    if "name" in request:
        return {}, _raw(opened.tensor(request["model"], request["name"]))
    return opened.description, None


def _raw(values: Tensor) -> memoryview:
    raw: Any = values.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def serve(requests: Iterable[bytes], into: IO[bytes]) -> None:
    files: dict[str, OpenedFile] = {}
    for line in requests:
        data = None
        try:
            reply, data = answer(json.loads(line), files)
        except Refused as error:
            reply = {"error": " ".join(str(error).split())}
        except Exception as error:  # whatever a hostile file makes torch raise
            said = " ".join(str(error).split())
            reply = {"error": f"not a whole file of torch.save ({type(error).__name__}: {said[:120]})"}
        into.write(json.dumps(reply).encode() + b"\n")
        if data is not None:
            into.write(data)
        into.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
