"""The parent's side of `megatron_unpickle.py`, which opens the pickles of Megatron-LM and torch.distributed.checkpoint:
plain values and bytes of tensors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import flat_bytes, parse_json
from megalite.errors import CheckpointError
from megalite.strangers import FencedProgram

PROGRAM = "megatron_unpickle.py"
MAX_ANSWER_BYTES = 256 * 2**20
DTYPES = {f"{dtype}": dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class Listing:
    """Content of a file."""

    args: Mapping[str, Any] | None
    version: float  # checkpoint_version
    iteration: Any
    # Of every virtual stage: name as it stands there -> (dtype, shape).
    models: tuple[Mapping[str, tuple[str, tuple[int, ...]]], ...]


class Unpickler:
    """A process that opens pickles, and lives as long as this object. Every method raises CheckpointError."""

    def __init__(self) -> None:
        self.program = FencedProgram(Path(__file__).with_name(PROGRAM))

    def open(self, path: Path) -> Listing:
        """Lists the content of a file, which stays open."""
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
        return self._tensor(path, name, entry, {"open": str(path), "model": model, "name": name})

    def metadata(self, path: Path) -> dict[str, Any]:
        """What a `.metadata` lists: see `megatron_unpickle.py`. Nothing of it is checked."""
        return self._ask(path, {"metadata": str(path)})

    def content(self, path: Path, at: tuple[int, int] | None = None) -> Any:
        """The plain values of a file of torch.save, or of the part `at` (offset, length) of a file."""
        return self._ask(path, {"content": str(path), "at": at}).get("content")

    def item(self, path: Path, name: str, at: tuple[int, int], entry: tuple[str, tuple[int, ...]]) -> Tensor:
        """The tensor in the part `at` (offset, length) of a file, which must be as `entry` says; name: for messages."""
        return self._tensor(path, name, entry, {"item": str(path), "at": at, "entry": entry})

    def _tensor(self, path: Path, name: str, entry: tuple[str, tuple[int, ...]], request: Mapping[str, Any]) -> Tensor:
        dtype, shape = entry
        if dtype not in DTYPES:
            raise CheckpointError(f"{path}: {name}: dtype {dtype} ({', '.join(DTYPES)})")
        self._ask(path, request)
        values = torch.empty(shape, dtype=DTYPES[dtype])
        if not self.program.fill(flat_bytes(values)):
            raise self._ended(path)
        return values

    def _ask(self, path: Path, request: Mapping[str, Any]) -> dict[str, Any]:
        self.program.send(json.dumps(request).encode() + b"\n")
        line = self.program.line(MAX_ANSWER_BYTES)
        if line is None:
            raise self._ended(path)
        reply = parse_json(line, str(path))
        if not isinstance(reply, dict) or "error" in reply:
            raise CheckpointError(f"{path}: {reply['error'] if isinstance(reply, dict) else 'no answer'}")
        return reply

    def _ended(self, path: Path) -> CheckpointError:
        return CheckpointError(f"{path}: the process that opened it ended (status {self.program.status()})")
