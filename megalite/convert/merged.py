"""Weighted means of checkpoints: a model and, behind its weights, a run that continues (model soups, arXiv 2203.05482;
checkpoint averaging of Llama 3, arXiv 2407.21783, section 3.4.3).

    weight of the result = (sum of weight_i x W_i) / (sum of weight_i), in fp64, rounded once to the dtype it had

Biases of experts are averaged, too. Moments, progress, data order and configuration are those of the checkpoint that is
named last: a mean of moments belongs to no weights that a gradient was taken at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import reader_of
from megalite.config import Config, architecture_differences, from_dict
from megalite.convert.adapters import BASE_META
from megalite.convert.megalite_files import CheckpointSource
from megalite.errors import CheckpointError
from megalite.stores import Place

MERGED = "merged"
"""Where a checkpoint says what it was merged of."""


class MergedSource(CheckpointSource):
    """The mean of several checkpoints.

    paths: of committed checkpoints; the last one gives what is not averaged. weights: one for each, above 0.
    parts: what is merged, as the result's meta says it.
    Raises CheckpointError where models differ, or have adapters or layers that are not ours.
    """

    def __init__(self, paths: Sequence[Place], weights: Sequence[float], *, use_ema: bool = False) -> None:
        super().__init__(paths[-1], use_ema=use_ema)
        readers, last = [*(reader_of(path, use_ema=use_ema) for path in paths[:-1]), self._reader], self._reader
        self._readers = {reader: weight / sum(weights) for reader, weight in zip(readers, weights, strict=True)}
        self.parts = [{"checkpoint": str(reader.path), "share": share} for reader, share in self._readers.items()]
        for reader in self._readers:
            where, meta = reader.path, reader.manifest.meta
            config = from_dict(meta["config"], str(where)) if isinstance(meta.get("config"), dict) else None
            if config is None or config.model.is_foreign:
                raise CheckpointError(f"{where}: holds no model of ours; only those of gpt and llama are merged")
            if BASE_META in meta or config.model.lora.lora_rank is not None:
                raise CheckpointError(
                    f"{where}: holds adapters, whose products have another mean than they; export each merged with its "
                    "model (tools/convert_checkpoint.py --to hf) first"
                )
            if differing := architecture_differences(config.model, self.model):
                listed = ", ".join(f"`{name}`={here} and {there}" for name, (there, here) in differing.items())
                raise CheckpointError(f"{where} and {last.path}: different models ({listed}); name those of one model")
            for name, stored in reader.manifest.tensors.items():
                known = last.manifest.tensors.get(name)
                if not name.startswith(("optimizer/", "previous/")) and (known is None or known.shape != stored.shape):
                    raise CheckpointError(f"{where}: {name} is not what it is in {last.path}")

    @property
    def run(self) -> MergedRun | None:
        """The run that continues from the mean; None where the checkpoint named last is of weights alone."""
        return MergedRun(self) if "progress" in self._reader.manifest.meta else None

    def read(self, name: str) -> Tensor:
        """The mean of a weight, in the dtype that it has in the checkpoint named last."""
        total = torch.zeros((), dtype=torch.float64)
        for reader, share in self._readers.items():
            total = total + reader.read(name).to(torch.float64) * share
        return total.to(self._reader.manifest.tensors[name].torch_dtype)


class MergedRun:
    """The `TrainedRun` of a `MergedSource`: its moments, progress and configuration are those of the checkpoint named
    last."""

    def __init__(self, source: MergedSource) -> None:
        self._source, self._reader = source, source._reader
        self.iteration = self._reader.manifest.step
        self.config: Config = from_dict(self._reader.manifest.meta["config"], str(self._reader.path))
        self.meta: Mapping[str, Any] = {**self._reader.manifest.meta, MERGED: source.parts}
        self._state = defaultdict[str, list[str]](list)
        for name in self._reader.manifest.tensors:
            if name.startswith("optimizer/"):
                self._state[name.split("/", 2)[-1]].append(name)

    @cached_property
    def rest(self) -> Mapping[str, Tensor]:
        """State that belongs to no parameter."""
        lone = self._state.keys() - self._reader.manifest.tensors.keys()
        return {name: self._reader.read(name) for owner in sorted(lone) for name in self._state[owner]}

    def read(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The mean of a parameter, and its moments."""
        yield name, self._source.read(name)
        yield from ((own, self._reader.read(own)) for own in self._state.get(name, ()))
