"""Weighted means of checkpoints: a model and, behind its weights, a run that continues (model soups, arXiv 2203.05482;
checkpoint averaging of Llama 3, arXiv 2407.21783, section 3.4.3).

    weight of the result = (sum of weight_i x W_i) / (sum of weight_i), in fp64, rounded once to the dtype it had

Biases of experts are averaged, too. Moments, progress, data order and configuration are those of the checkpoint that is
named last: a mean of moments belongs to no weights that a gradient was taken at.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.config import architecture_differences
from megalite.convert.adapters import BASE_META
from megalite.convert.megalite_files import CheckpointSource
from megalite.errors import CheckpointError
from megalite.stores import Place

MERGED = "merged"
"""Where a checkpoint says what it was merged of."""


class MergedSource(CheckpointSource):
    """The mean of several checkpoints.

    paths: of committed checkpoints; the last one gives what is not averaged. weights: one for each, above 0.
    parts: what is merged, as the result's meta says it. continues: whether the mean is a `TrainedRun`, too; not where
    the last checkpoint is of weights alone.
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
        self.iteration, self.continues = self._reader.manifest.step, "progress" in self._reader.manifest.meta

    def read(self, name: str) -> Tensor:
        """The mean of a weight in the dtype that the checkpoint named last has it in, or that one's optimizer state."""
        if name.startswith("optimizer/"):
            return self._reader.read(name)
        total = torch.zeros((), dtype=torch.float64)
        for reader, share in self._shares.items():
            total = total + reader.read(name).to(torch.float64) * share
        return total.to(self._reader.manifest.tensors[name].torch_dtype)

    stored = read

    @property
    def names(self) -> Collection[str]:
        return self._reader.manifest.tensors

    @property
    def meta(self) -> Mapping[str, Any]:
        return {**self._reader.manifest.meta, MERGED: self.parts}
