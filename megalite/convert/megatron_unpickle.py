"""Opens Megatron-LM's pickled files for another process. A program of its own: nothing in the product imports it.

It reads requests, one JSON object a line, from standard input, and answers on standard output with one JSON line each:

    {"open": FILE}                                 {"args": {...}, "models": [{name: [dtype, shape]}], ...}
    {"open": FILE, "model": 0, "name": NAME}       {} and the tensor's bytes
    anything that goes wrong                       {"error": "one line"}

torch's weights-only unpickler calls nothing but what rebuilds tensors. Whatever else such files hold (enums of
Megatron, states of random generators and optimizers) becomes a `StandIn`, which takes any arguments and does nothing;
a name outside `PACKAGES` is refused before anything is unpickled.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import pickletools
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

import torch
from torch import Tensor

# Packages that torch's unpickler judges by itself.
KNOWN_TO_TORCH = ("torch", "collections", "_codecs")
# Where the classes of a checkpoint come from; none of them is imported, a StandIn takes its place.
PACKAGES = ("megatron", "apex", "fp16", "transformer_engine", "numpy", "signal", "pathlib", "types", "io", "_io")
ARGUMENTS = "argparse.Namespace"
# Python 3.11.0 to 3.11.3 write the member of an enum as getattr(its class, its name).
GETATTR = ("__builtin__.getattr", "builtins.getattr")
MAX_PICKLE_BYTES = 512 * 2**20
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
        archive = zipfile.is_zipfile(path)
        allowed: list[Any] = list(_stand_ins(path, archive))
        with torch.serialization.safe_globals(allowed):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
        if not isinstance(content, Mapping):
            raise Refused("holds no dictionary")
        keys = (
            ["model"] if "model" in content else [key for i in range(len(content)) if (key := f"model{i}") in content]
        )
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


def _stand_ins(path: str, archive: bool) -> Iterator[tuple[Any, str]]:
    """The objects that torch's unpickler gets for the names in a file. Raises Refused."""
    for name in set(_names(path, archive)):
        package = name.split(".")[0]
        if name == ARGUMENTS:
            yield argparse.Namespace, name
        elif name in GETATTR:
            yield member, "builtins.getattr"  # as torch reads it
        elif package in PACKAGES:
            yield MegatronsOwn if package == "megatron" else StandIn, name
        elif package not in KNOWN_TO_TORCH:
            raise Refused(f"asks for {name[:80]}, which no Megatron-LM checkpoint needs; nothing of it was executed")


def member(owner: object, name: object) -> StandIn:
    """In the place of `getattr`: a member of an enum of Megatron's. Raises Refused for anything else."""
    if not (isinstance(owner, type) and issubclass(owner, MegatronsOwn)):
        raise Refused(
            "asks for builtins.getattr, which no Megatron-LM checkpoint needs but for its own enums; nothing of it was "
            "executed"
        )
    return owner()


def _names(path: str, archive: bool) -> Iterator[str]:
    """The classes and functions that a file's pickles name, read as text."""
    if not archive:
        with open(path, "rb") as file:
            for _ in range(PICKLES_OF_OLD_FILES):
                yield from _names_of(file)
        return
    with zipfile.ZipFile(path) as opened:
        if (damaged := opened.testzip()) is not None:
            raise Refused(f"the checksum of {damaged[:80]} in it is wrong: the file is damaged")
        pickles = [entry for entry in opened.infolist() if entry.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
            raise Refused("not a file of torch.save")
        yield from _names_of(io.BytesIO(opened.read(pickles[0])))


def _names_of(file: IO[bytes]) -> Iterator[str]:
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name in ("GLOBAL", "INST"):
            yield str(argument).replace(" ", ".")
        elif opcode.name == "STACK_GLOBAL":
            raise Refused("not a pickle as torch.save writes it")


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
    """A value that JSON has; the others as their type's name."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return f"<{type(value).__name__}>"


def answer(request: Mapping[str, Any], files: dict[str, OpenedFile]) -> tuple[dict[str, Any], memoryview | None]:
    """The line and the bytes that answer a request; `files` keeps what is open."""
    path = request["open"]
    if path not in files:
        files[path] = OpenedFile(path)
    if "name" not in request:
        return files[path].description, None
    values = files[path].models[request["model"]][request["name"]]
    return {}, memoryview(values.detach().contiguous().view(-1).view(torch.uint8).numpy())


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
