"""Weighted means of checkpoints: a model and, behind its weights, a run that continues (model soups, arXiv 2203.05482;
checkpoint averaging of Llama 3, arXiv 2407.21783, section 3.4.3).

    weight of the result = (sum of weight_i x W_i) / (sum of weight_i), in fp64, rounded once to the dtype it had

Biases of experts are averaged, too. Moments, progress, data order and configuration are those of the checkpoint that is
named last: a mean of moments belongs to no weights that a gradient was taken at.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint import directory_name, write_tracker, write_whole
from megalite.config import architecture_differences
from megalite.convert.adapters import BASE_META
from megalite.convert.megalite_files import CheckpointSource, write_checkpoint
from megalite.convert.source import staged
from megalite.data import tokenizer_files
from megalite.errors import CheckpointError
from megalite.inventory import layer_of
from megalite.stores import Place

MERGED = "merged"
"""Where a checkpoint says what it was merged of."""


class MergedSource(CheckpointSource):
    """The mean of several checkpoints.

    paths: of committed checkpoints; the last one gives what is not averaged. weights: one for each, above 0.
    parts: what is merged, as the result's meta says it. iteration: after which the mean continues; None where the last
    checkpoint is of weights alone.
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
        self.iteration = manifest.step if "progress" in manifest.meta else None

    def read(self, name: str) -> Tensor:
        """The mean of a weight in the dtype that the checkpoint named last has it in, or that one's optimizer state."""
        if name.startswith("optimizer/"):
            return self._reader.read(name)
        total = torch.zeros((), dtype=torch.float64)
        for reader, share in self._shares.items():
            total = total + reader.read(name).to(torch.float64) * share
        return total.to(self._reader.manifest.tensors[name].torch_dtype)

    def write(self, directory: Path, *, with_state: bool = True) -> Path:
        """A committed checkpoint, one file a layer; returns its directory. with_state: one that continues, where the
        last does. Raises CheckpointError."""
        if self.iteration is None or not with_state:
            return write_checkpoint(self, directory)
        manifest, name = self._reader.manifest, directory_name(self.iteration)
        kept = sorted((each for each in manifest.tensors if not each.startswith("previous/")), key=_layer)
        layers = ({each: self.read(each) for each in layer} for _, layer in groupby(kept, _layer))
        with staged(directory, name, model=self.model, dtype=None) as staging:
            meta = {**manifest.meta, MERGED: self.parts}
            write_whole(staging, layers, tokenizer_files(self.tokenizer), lambda _: meta, self.iteration)
        write_tracker(directory, self.iteration)
        return directory / name


def _layer(name: str) -> str:
    """The layer of a weight, or of a weight's moment."""
    return layer_of(name.split("/", 2)[-1])
