"""A checkpoint of megalite's own on disk: read tensor by tensor, written layer by layer; means of several."""

import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import (
    CheckpointReader,
    StoredTensor,
    check_tensors,
    copy_extras,
    directory_name,
    resolve_checkpoint,
    write_tracker,
    write_whole,
)
from megalite.config import ModelConfig, architecture_differences, from_dict, to_dict
from megalite.convert.model_card import TrainingFacts
from megalite.convert.origin import ORIGIN_META, Origin
from megalite.convert.registry import config_of_weights
from megalite.convert.source import EXPERT_BIAS, ModelSource, TrainedRun, converted, staged, stored_shapes
from megalite.data import Tokenizer, load_tokenizer, tokenizer_files
from megalite.errors import CheckpointError
from megalite.inventory import layer_of
from megalite.stores import Place

BASE_META = "base"
"""Where a checkpoint of adapters says which model they are beside."""
MERGED = "merged"
"""Where a checkpoint says what it was merged of."""


class CheckpointSource:
    """The weights of a checkpoint: of a run directory the newest, or `ckpt_step`; optimizer state is left out. use_ema:
    the averages of the weights instead.

    Raises CheckpointError where nothing is committed, or it is damaged.
    """

    def __init__(self, directory: Place | str, ckpt_step: int | None = None, *, use_ema: bool = False) -> None:
        self._reader = CheckpointReader(resolve_checkpoint(directory, ckpt_step), use_ema=use_ema)
        self.path = self._reader.path  # the checkpoint's own directory
        meta = self._reader.manifest.meta
        if not isinstance(meta.get("config"), dict):
            raise CheckpointError(f"{self._reader.path}: holds no configuration; was it written by megalite?")
        self.config = config = from_dict(meta["config"], str(self._reader.path))
        self.model: ModelConfig = config.model
        if self.model.is_foreign:
            name, weights = self.model.module.model_module, f"megalite.read_weights({str(self.path)!r})"
            raise CheckpointError(
                f"{self.path}: holds a `model_module` ({name}), which its own code converts; give it its weights: "
                f"model.load_state_dict({weights})"
            )
        self.facts = TrainingFacts.of(self._reader.manifest, config, str(self._reader.path))
        check_tensors(self.model, self._reader.manifest.tensors, str(self._reader.path))
        self.origin = Origin.from_meta(meta.get(ORIGIN_META))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Rebuilt from verified copies of the checkpoint's files."""
        return self.tokenizer_of(self._reader)

    @staticmethod
    def tokenizer_of(reader: CheckpointReader) -> Tokenizer:
        """The tokenizer of an open checkpoint."""
        path, manifest = reader.path, reader.manifest
        with tempfile.TemporaryDirectory(prefix="megalite-tokenizer-") as folder:
            copy_extras(path, manifest, Path(folder))
            return load_tokenizer(folder, f"`load`={path}")

    def read(self, name: str) -> Tensor:
        return self._reader.read(name)


class MergedSource(CheckpointSource):
    """The weighted mean of several checkpoints: a model and, behind its weights, a run that continues (model soups,
    arXiv 2203.05482; checkpoint averaging of Llama 3, arXiv 2407.21783, section 3.4.3).

        weight of the result = (sum of weight_i x W_i) / (sum of weight_i), in fp64, rounded once to the dtype it had

    Biases of experts are averaged, too. Moments, progress, data order and configuration are those of the last one: a
    mean of moments belongs to no weights that a gradient was taken at.

    paths: of committed checkpoints. weights: one for each, above 0. parts: what is merged, as the result's meta says
    it. continues: whether the mean is a `TrainedRun`, too; not where the last checkpoint is of weights alone.
    Raises CheckpointError where models differ, or have adapters or layers that are not ours.
    """

    def __init__(self, paths: Sequence[Place], weights: Sequence[float], *, use_ema: bool = False) -> None:
        super().__init__(paths[-1], use_ema=use_ema)
        sources = [*(CheckpointSource(path, use_ema=use_ema) for path in paths[:-1]), self]
        for source in sources:
            if BASE_META in source._reader.manifest.meta or source.model.lora.lora_rank is not None:
                raise CheckpointError(
                    f"{source.path}: holds adapters, whose products have another mean than they; export each merged "
                    "with its model (tools/convert_checkpoint.py --to hf) first"
                )
            if differing := architecture_differences(source.model, self.model):
                listed = ", ".join(f"`{name}`={here} and {there}" for name, (there, here) in differing.items())
                raise CheckpointError(
                    f"{source.path} and {self.path}: different models ({listed}); name those of one model"
                )
        self._shares = {source._reader: weight / sum(weights) for source, weight in zip(sources, weights, strict=True)}
        self.parts = [{"checkpoint": str(reader.path), "share": share} for reader, share in self._shares.items()]
        manifest = self._reader.manifest
        self.iteration, self.continues = manifest.step, "progress" in manifest.meta
        self.names: Collection[str] = manifest.tensors
        self.meta: Mapping[str, Any] = {**manifest.meta, MERGED: self.parts}

    def read(self, name: str) -> Tensor:
        """The mean of a weight in the dtype that the checkpoint named last has it in, or that one's optimizer state."""
        if name.startswith("optimizer/"):
            return self._reader.read(name)
        total = torch.zeros((), dtype=torch.float64)
        for reader, share in self._shares.items():
            total = total + reader.read(name).to(torch.float64) * share
        return total.to(self._reader.manifest.tensors[name].torch_dtype)

    stored = read


def write_checkpoint(
    source: ModelSource, directory: Path, *, dtype: torch.dtype | None = None, run: TrainedRun | None = None
) -> Path:
    """A committed checkpoint, one file a layer; returns its directory.

    dtype: of the stored weights; None keeps each as it is. run: what has trained them, so that it continues at
    its iteration; None: the weights alone, at iteration 0. Raises CheckpointError.
    """
    step = 0 if run is None else run.iteration
    name = directory_name(step)

    def meta(tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
        said = {} if run is None else run.meta
        stored = tensors["embedding.word_embeddings.weight"].torch_dtype
        return {
            "iteration": step,
            "consumed_samples": said.get("progress", {}).get("consumed_samples", 0),
            "config": to_dict(config_of_weights(source.model, stored) if run is None else run.config),
            **said,
            ORIGIN_META: source.origin.to_meta(),
        }

    with staged(directory, name, model=source.model, dtype=dtype) as staging:
        write_whole(staging, _layers(source, dtype, run), tokenizer_files(source.tokenizer), meta, step)
    write_tracker(directory, step)
    return directory / name


def _layers(source: ModelSource, dtype: torch.dtype | None, run: TrainedRun | None) -> Iterator[dict[str, Tensor]]:
    """The stored tensors, layer by layer. Raises CheckpointError where one has not the shape that the model has."""
    shapes, kept = stored_shapes(source.model), defaultdict[str, list[str]](list)
    for name in () if run is None else sorted(run.names):
        kept[name.split("/", 2)[-1] if name.startswith("optimizer/") else name].append(name)
    for _, names in groupby(shapes, layer_of):
        layer: dict[str, Tensor] = {}
        for name in names:
            if run is not None and not name.endswith(EXPERT_BIAS):
                layer |= {key: run.stored(key) for key in kept.pop(name)}
                continue
            values = source.read(name)
            if tuple(values.shape) != shapes[name]:
                raise CheckpointError(f"{name}: shape {list(values.shape)}, the model has {list(shapes[name])}")
            layer[name] = converted(name, values, dtype)
        yield layer
    if run is not None:
        lone = [key for keys in kept.values() for key in keys if key.startswith("optimizer/")]
        yield {key: run.stored(key) for key in lone}
