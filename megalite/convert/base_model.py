"""The model beside adapters: a checkpoint of adapters names it, proves that it is the same, and takes its weights from
there.

    meta "base"    {"path": its directory, "digest": checksum of its content}, or {"seed": s}: random weights
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from megalite.checkpoint import COMMITTED, Meta, is_huggingface, resolve_checkpoint
from megalite.comm import Axis, all_gather_json, patiently
from megalite.convert.hf_files import CONFIG, HuggingFaceSource
from megalite.convert.megalite_files import CheckpointSource
from megalite.convert.source import ModelSource
from megalite.errors import CheckpointError, MegaliteError

BASE_META = "base"
LONGEST_PATH = 4096  # characters; systems allow no more


@dataclass(frozen=True)
class BaseModel:
    """path: a Hugging Face model or a checkpoint; None: the run began with the random weights of `seed`."""

    path: Path | None
    digest: str = ""
    seed: int = 0

    @classmethod
    def at(cls, path: Path, world: Axis) -> BaseModel:
        """The model that lies there now. Collective over `world`, whose ranks share the reading. Raises
        CheckpointError, on all ranks."""
        return cls(path.resolve(), _digest(path, world))

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any], where: str) -> BaseModel:
        """What a checkpoint of adapters says. Raises CheckpointError."""
        told = Meta(meta, where).section(BASE_META)
        path, digest = told.raw.get("path"), told.raw.get("digest", "")
        if not isinstance(path, str | None) or len(path or "") > LONGEST_PATH or not isinstance(digest, str):
            raise told.wrong("path", "the place of a model")
        return cls(None if path is None else Path(path), digest, told.integer("seed", 0))

    def to_meta(self) -> dict[str, Any]:
        return {"seed": self.seed} if self.path is None else {"path": str(self.path), "digest": self.digest}

    def found(self, where: str, world: Axis, elsewhere: Path | None = None) -> BaseModel:
        """The same, at the place `elsewhere` if that is given, its content compared. Collective.

        where: the adapters, as messages name them. Raises CheckpointError, on all ranks.
        """
        path = elsewhere or self.path
        if path is None:
            raise CheckpointError(f"{where}: adapters of a model with random weights, which is stored nowhere")
        if not os.path.isdir(path):
            raise CheckpointError(
                f"{where}: adapters of the model {path}, which is not there; bring it back, or name its place: --load "
                "to train (beside --auto-resume), --base to convert"
            )
        if (now := _digest(path, world)) != self.digest:
            raise CheckpointError(
                f"{where}: adapters of another model than {path} (digest {self.digest}, there {now}); give that"
            )
        return replace(self, path=path)

    def open(self) -> ModelSource:
        """Its weights. Raises CheckpointError; ConfigError for a model that we do not have."""
        assert self.path is not None
        return HuggingFaceSource(self.path) if is_huggingface(self.path) else CheckpointSource(self.path)


def _digest(path: Path, world: Axis) -> str:
    """A checkpoint's proof proves all of it; of a Hugging Face model every byte of weights and configuration is read,
    file by file by the ranks in turn."""
    own: dict[str, str] = {}
    problem = None
    try:
        if is_huggingface(path):
            files = sorted([path / CONFIG, *path.glob("*.safetensors")])
        else:
            files = [resolve_checkpoint(path) / COMMITTED]
        mine = files[world.rank :: world.size]
        own = patiently(lambda: {file.name: _checksum(file) for file in mine}, world) or {}
    except (MegaliteError, OSError) as error:
        problem = str(error)
    told = all_gather_json([own, problem], world)
    problem = next((text for _, text in told if text is not None), None)
    if problem is not None:
        raise CheckpointError(problem)
    lines = sorted(f"{name} {digest}" for found, _ in told for name, digest in found.items())
    return xxhash.xxh3_64_hexdigest("\n".join(lines).encode())


def _checksum(path: Path) -> str:
    total = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            total.update(block)
    return total.hexdigest()
