"""The process that opens Megatron-LM's pickled files; this one only sees plain values and bytes of tensors."""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, cast

import torch
from torch import Tensor

from megalite.checkpoint import flat_bytes, parse_json
from megalite.errors import CheckpointError

PROGRAM = "megatron_unpickle.py"
MAX_ANSWER_BYTES = 256 * 2**20
DTYPES = {
    "torch.float64": torch.float64,
    "torch.float32": torch.float32,
    "torch.float16": torch.float16,
    "torch.bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class Listing:
    """What is in a file: args (None where it has none), checkpoint_version, iteration, tensors of every virtual stage.

    models: name -> (dtype, shape), names as they stand there.
    """

    args: Mapping[str, Any] | None
    version: float
    iteration: Any
    models: tuple[Mapping[str, tuple[str, tuple[int, ...]]], ...]


class Unpickler:
    """Asks the other process, which lives as long as this object. Every method raises CheckpointError."""

    def __init__(self) -> None:
        # -P: nothing beside that program is importable by accident
        program = [sys.executable, "-P", str(Path(__file__).with_name(PROGRAM))]
        self._process = Popen(program, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        weakref.finalize(self, _end, self._process)

    def open(self, path: Path) -> Listing:
        """What a file holds; it stays open."""
        reply = self._ask(path, {"open": str(path)})
        try:
            models = tuple(
                {str(name): (str(dtype), tuple(int(n) for n in shape)) for name, (dtype, shape) in model.items()}
                for model in reply["models"]
            )
            args, version = reply["args"], reply["version"]
            if not (args is None or isinstance(args, dict)) or type(version) not in (int, float):
                raise ValueError("args or checkpoint_version")
        except (AttributeError, KeyError, TypeError, ValueError):
            raise CheckpointError(f"{path}: not what Megatron-LM writes") from None
        return Listing(args, version, reply.get("iteration"), models)

    def read(self, path: Path, model: int, name: str, entry: tuple[str, tuple[int, ...]]) -> Tensor:
        """The tensor `name` of virtual stage `model`; `entry` is what `open` said of it."""
        dtype, shape = entry
        if dtype not in DTYPES:
            raise CheckpointError(f"{path}: {name}: dtype {dtype} ({', '.join(DTYPES)})")
        self._ask(path, {"open": str(path), "model": model, "name": name})
        values = torch.empty(shape, dtype=DTYPES[dtype])
        into = flat_bytes(values)
        stdout = cast(BufferedReader, self._process.stdout)
        while into:
            count = stdout.readinto(into)
            if not count:
                raise self._ended(path)
            into = into[count:]
        return values

    def _ask(self, path: Path, request: Mapping[str, Any]) -> dict[str, Any]:
        pipe = self._process
        assert pipe.stdin is not None and pipe.stdout is not None
        try:
            pipe.stdin.write(json.dumps(request).encode() + b"\n")
            pipe.stdin.flush()
        except OSError:
            raise self._ended(path) from None
        line = pipe.stdout.readline(MAX_ANSWER_BYTES)
        if not line.endswith(b"\n"):
            raise self._ended(path)
        reply = parse_json(line, str(path))
        if not isinstance(reply, dict) or "error" in reply:
            raise CheckpointError(f"{path}: {reply['error'] if isinstance(reply, dict) else 'no answer'}")
        return reply

    def _ended(self, path: Path) -> CheckpointError:
        self._process.kill()
        return CheckpointError(f"{path}: the process that opened it ended (status {self._process.wait()})")


def _end(process: Popen[bytes]) -> None:
    """It ends by itself once no more requests come."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.close()
    except OSError:
        pass  # it has ended already
    process.stdout.close()
    process.wait()
