"""Weighted means of checkpoints: a model and, behind its weights, a run that continues (model soups, arXiv 2203.05482;
checkpoint averaging of Llama 3, arXiv 2407.21783, section 3.4.3).

    weight of the result = (sum of weight_i x W_i) / (sum of weight_i), in fp64, rounded once to the dtype it had

Biases of experts are averaged, too. Moments, progress, data order and configuration are those of the checkpoint that is
named last: a mean of moments belongs to no weights that a gradient was taken at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import CheckpointReader, reader_of
from megalite.config import Config, architecture_differences, from_dict
from megalite.convert.adapters import BASE_META
from megalite.convert.megalite_files import CheckpointSource
from megalite.errors import CheckpointError
from megalite.stores import Place

MERGED = "merged"
"""Where a checkpoint says what it was merged of."""


@dataclass(frozen=True)
class _Part:
    """A checkpoint and its share of the mean."""

    reader: CheckpointReader
    share: float


class MergedSource(CheckpointSource):
    """The mean of several checkpoints.

    paths: of committed checkpoints; the last one gives what is not averaged. weights: one for each, above 0.
    Raises CheckpointError where models differ, or have adapters or layers that are not ours.
    """

    def __init__(self, paths: Sequence[Place], weights: Sequence[float], *, use_ema: bool = False) -> None:
        super().__init__(paths[-1])
        total = sum(weights)
        self._parts = [_Part(reader_of(p, use_ema=use_ema), w / total) for p, w in zip(paths, weights, strict=True)]
        last = self._parts[-1].reader
        for part in self._parts:
            where, meta = part.reader.path, part.reader.manifest.meta
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
            for name, stored in part.reader.manifest.tensors.items():
                known = last.manifest.tensors.get(name)
                if not name.startswith(("optimizer/", "previous/")) and (known is None or known.shape != stored.shape):
                    raise CheckpointError(f"{where}: {name} is not what it is in {last.path}")

    @property
    def last(self) -> CheckpointReader:
        """The checkpoint named last."""
        return self._reader

    @property
    def parts(self) -> list[dict[str, Any]]:
        """What is merged, as the result's meta says it."""
        return [{"checkpoint": str(part.reader.path), "share": part.share} for part in self._parts]

    @property
    def run(self) -> MergedRun | None:
        """The run that continues from the mean; None where the checkpoint named last is of weights alone."""
        return MergedRun(self) if "progress" in self._reader.manifest.meta else None

    def read(self, name: str) -> Tensor:
        """The mean of a weight, in the dtype that it has in the checkpoint named last."""
        total: Tensor | None = None
        for part in self._parts:
            values = part.reader.read(name).to(torch.float64).mul_(part.share)
            total = values if total is None else total.add_(values)
        assert total is not None
        return total.to(self._reader.manifest.tensors[name].torch_dtype)


class MergedRun:
    """The `TrainedRun` of a `MergedSource`: its moments, progress and configuration are those of the checkpoint named
    last."""

    def __init__(self, source: MergedSource) -> None:
        self._source = source
        self._reader = source.last
        self.iteration = self._reader.manifest.step
        self.config: Config = from_dict(self._reader.manifest.meta["config"], str(self._reader.path))
        self.meta: Mapping[str, Any] = {**self._reader.manifest.meta, MERGED: source.parts}
        names = [name for name in self._reader.manifest.tensors if name.startswith("optimizer/")]
        self._state: dict[str, list[str]] = {}
        for name in names:
            self._state.setdefault(name.removeprefix("optimizer/").partition("/")[2], []).append(name)

    @cached_property
    def rest(self) -> Mapping[str, Tensor]:
        """State that belongs to no parameter."""
        weights = self._reader.manifest.tensors
        names = [name for owner, own in self._state.items() if owner not in weights for name in own]
        return {name: self._reader.read(name) for name in names}

    def read(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The mean of a parameter, and its moments."""
        yield name, self._source.read(name)
        for own in self._state.get(name, ()):
            yield own, self._reader.read(own)
