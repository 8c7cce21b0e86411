"""Our side on disk: a committed checkpoint, read tensor by tensor and written layer by layer."""

from __future__ import annotations

import tempfile
import uuid
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import (
    BLOCK_BYTES,
    DTYPE_NAMES,
    Box,
    CheckpointReader,
    ExtraFile,
    Manifest,
    StoredFile,
    StoredTensor,
    TensorPart,
    check_tensors,
    copy_extras,
    directory_name,
    resolve_checkpoint,
    write_file,
    write_proof,
    write_shard_file,
    write_tracker,
)
from megalite.config import ModelConfig, from_dict, to_dict
from megalite.convert.registry import config_around
from megalite.convert.source import ModelSource, Origin, converted, staged, stored_shapes
from megalite.data import Tokenizer, load_tokenizer, tokenizer_files
from megalite.errors import CheckpointError
from megalite.inventory import layer_of


class CheckpointSource:
    """The weights of a checkpoint: of a run directory the newest, or `ckpt_step`; optimizer state is left out.

    Raises CheckpointError where nothing is committed, or it is damaged.
    """

    def __init__(self, directory: Path | str, ckpt_step: int | None = None) -> None:
        self._reader = CheckpointReader(resolve_checkpoint(directory, ckpt_step))
        meta = self._reader.manifest.meta
        if not isinstance(meta.get("config"), dict):
            raise CheckpointError(f"{self._reader.path}: holds no configuration; was it written by megalite?")
        self.model: ModelConfig = from_dict(meta["config"], str(self._reader.path)).model
        check_tensors(self.model, self._reader.manifest.tensors, str(self._reader.path))
        self.origin = Origin.from_meta(meta.get("converted_from"))

    @property
    def path(self) -> Path:
        """The checkpoint's own directory."""
        return self._reader.path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Rebuilt from verified copies of the checkpoint's files."""
        return self.tokenizer_of(self._reader)

    @staticmethod
    def tokenizer_of(reader: CheckpointReader) -> Tokenizer:
        """That of an open checkpoint."""
        path, manifest = reader.path, reader.manifest
        with tempfile.TemporaryDirectory(prefix="megalite-tokenizer-") as folder:
            copy_extras(path, manifest, Path(folder))
            return load_tokenizer(folder, f"--load={path}")

    def read(self, name: str) -> Tensor:
        return self._reader.read(name)


def write_checkpoint(source: ModelSource, directory: Path, *, dtype: torch.dtype | None = None) -> Path:
    """A committed checkpoint of the weights at iteration 0, one file a layer; returns its directory.

    dtype: of the stored weights; None keeps each as it is. Raises CheckpointError.
    """
    shapes = stored_shapes(source.model)
    save_id, name = uuid.uuid4().hex[:12], directory_name(0)
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}
    with staged(directory, name, model=source.model, dtype=dtype) as staging:
        for number, (_, names) in enumerate(groupby(shapes, layer_of)):
            parts = [_part(each, source.read(each), shapes[each], dtype) for each in names]
            tensors |= {p.name: StoredTensor(DTYPE_NAMES[p.values.dtype], p.global_shape) for p in parts}
            file_name = f"rank_{number:05d}.safetensors"
            files[file_name] = write_shard_file(staging / file_name, parts, save_id=save_id, block_bytes=BLOCK_BYTES)
        extra = {
            each: ExtraFile(len(data), write_file(staging / each, data))
            for each, data in tokenizer_files(source.tokenizer).items()
        }
        meta = _meta(source, tensors["embedding.word_embeddings.weight"].torch_dtype)
        write_proof(staging, Manifest(0, save_id, 1, tensors, files, extra, meta))
    write_tracker(directory, 0)
    return directory / name


def _part(name: str, values: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> TensorPart:
    if tuple(values.shape) != shape:
        raise CheckpointError(f"{name}: shape {list(values.shape)}, the model has {list(shape)}")
    return TensorPart(name, shape, Box((0,) * len(shape), shape), converted(name, values, dtype))


def _meta(source: ModelSource, dtype: torch.dtype) -> dict[str, Any]:
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}.get(dtype)
    config = config_around(source.model, **({precision: True} if precision else {}))
    found = {"config": to_dict(config), "converted_from": source.origin.to_meta()}
    return {"iteration": 0, "consumed_samples": 0, **found}
