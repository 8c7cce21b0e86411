"""What is converted: a model that gives its logical tensors one by one, wherever they come from."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from torch import Tensor

from megalite.config import ModelConfig
from megalite.data import Tokenizer
from megalite.errors import CheckpointError

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Origin:
    """What a model was elsewhere: its `model_type` there, and the ids of its special tokens."""

    model_type: str | None = None
    special_tokens: Mapping[str, Any] = field(default_factory=dict)

    def to_meta(self) -> dict[str, Any]:
        """For a checkpoint's meta."""
        return {"model_type": self.model_type, **self.special_tokens}

    @classmethod
    def from_meta(cls, raw: Any) -> Origin:
        """The inverse; anything that is not what `to_meta` writes is dropped. Also reads a config.json."""
        if not isinstance(raw, Mapping):
            return cls()
        kind = raw.get("model_type")
        ids = {name: raw[name] for name in SPECIAL_TOKENS if _is_token(raw.get(name))}
        return cls(kind if isinstance(kind, str) else None, ids)


def _is_token(value: Any) -> bool:
    return type(value) is int or (isinstance(value, list) and all(type(item) is int for item in value))


class ModelSource(Protocol):
    """A model on disk. `read` raises CheckpointError where its tensor is missing or damaged."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def origin(self) -> Origin: ...
    @property
    def tokenizer(self) -> Tokenizer: ...

    def read(self, name: str) -> Tensor:
        """A logical tensor as it is stored, on the CPU."""
        ...


@contextmanager
def staged(directory: Path, name: str | None = None) -> Iterator[Path]:
    """A new directory to write into, which becomes `directory` (or `name` in it) when the body has ended well.

    Raises CheckpointError where it exists already and holds something, or cannot be written.
    """
    final = directory if name is None else directory / name
    try:
        if directory.exists() and any(directory.iterdir()):
            raise CheckpointError(
                f"--save={directory}: exists and is not empty; nothing is overwritten, choose another"
            )
        final.parent.mkdir(parents=True, exist_ok=True)
        staging = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:12]}")
        staging.mkdir()
    except OSError as error:
        raise CheckpointError(f"--save={directory}: cannot write there ({error.strerror})") from None
    try:
        yield staging
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(f"--save={directory}: {error.filename or staging}: {error.strerror or error}") from None
    except SafetensorError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(f"--save={directory}: {staging}: {error}") from None
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
