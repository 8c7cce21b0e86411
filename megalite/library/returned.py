"""What a rank returned, read by the process that started it: JSON, and tensors beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.errors import ConfigError

VALUE, TENSORS = "value.json", "tensors.safetensors"


def write_value(value: object, folder: Path, giver: str) -> None:
    """Leaves a value in a folder. Raises ConfigError, which names `giver`, for what is no plain value."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_plain(value, tensors, giver))
    save_file(tensors, folder / TENSORS)
    (folder / VALUE).write_text(text, encoding="utf-8")


def read_value(folder: Path) -> Any:
    """What `write_value` has left there; tensors are on the CPU."""
    return _whole(json.loads((folder / VALUE).read_text(encoding="utf-8")), load_file(folder / TENSORS))


def _plain(value: object, tensors: dict[str, Tensor], giver: str) -> Any:
    """JSON of a value; its tensors are added to `tensors`. What is no list, number or string is {kind: content}."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone().contiguous()  # also of tensors that share memory
        return {"tensor": name}
    if isinstance(value, list):
        return [_plain(item, tensors, giver) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(item, tensors, giver) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(part, tensors, giver) for part in item] for item in value.items()]}
    raise ConfigError(
        f"{giver} returns {type(value).__name__}, which does not leave its rank; return numbers, strings, tensors, or "
        "lists, tuples and dicts of them"
    )


def _whole(plain: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(plain, list):
        return [_whole(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_whole(item, tensors) for item in content)
    return {_whole(key, tensors): _whole(item, tensors) for key, item in content}
