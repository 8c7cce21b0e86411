"""Histories that `--fp8-recipe delayed` takes scales from, one update longer at every STEP.

A history belongs to a weight version, as the scales made of it are those of products with its weights. It is the same
on all ranks of a stage, and at every layout: an update appends the largest magnitude of its batch, over all
micro-batches and all ranks that hold parts; 0 where it is not finite (and the update is skipped).
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megalite.comm import Axis, TensorShard
from megalite.engine.versioned import VersionedState
from megalite.parallel.pipeline import Stage
from megalite.parallel.tensor import ScaleTable, delayed_products
from megalite.schedule import StageKey

SCALES = "optimizer/fp8/"  # of their names in a checkpoint


class ScaleHistory(VersionedState):
    """The histories of this rank's stages. An update that is skipped counts, too."""

    absent = SCALES

    def __init__(self, stages: Mapping[StageKey, Stage], axis: Axis, replicas: Mapping[int, Axis]) -> None:
        super().__init__(stages, axis, replicas)
        self._tables: dict[StageKey, list[ScaleTable]] = {}
        self._names: dict[StageKey, list[str]] = {}
        for key, stage in sorted(stages.items()):
            versions = [delayed_products(module) for module in stage.modules]
            if versions[0]:
                self._names[key] = list(versions[0])
                self._tables[key] = [ScaleTable(list(layers.values())) for layers in versions]

    @torch.no_grad()
    def step(self, wanted: Callable[[int], bool], found_inf: Tensor, version: int) -> None:
        for key, tables in self._tables.items():
            old, new = self._at(tables, version - 1), self._at(tables, version)
            largest = self.stages[key].magnitudes.take(wanted, like=old.history[:, :, 0])
            largest.nan_to_num_(nan=math.inf, posinf=math.inf)  # a message may lose a NaN
            self._over_ranks(key, largest, op="max")
            newest = largest.masked_fill_(largest == math.inf, 0.0)[..., None]
            new.history.copy_(torch.cat([newest, old.history[..., :-1]], -1))
            new.take_up()

    def copy(self, version: int, target: int) -> None:
        for tables in self._tables.values():
            source, other = self._at(tables, version), self._at(tables, target)
            if source.known:
                other.history.copy_(source.history)
                other.take_up()

    def after_load(self, version: int) -> None:
        """Takes up what was loaded for a weight version, if an update had written it."""
        for tables in self._tables.values():
            if self._at(tables, version).history.any():
                self._at(tables, version).take_up()

    def shards(self, version: int, prefix: str = "") -> list[TensorShard]:
        """The histories of a version as `<prefix>optimizer/fp8/<layer>` (views)."""
        return [
            TensorShard(f"{prefix}{SCALES}{name}", tuple(history.shape), (0, 0), history, self.axis.rank + key[1])
            for key, tables in self._tables.items()
            for name, history in zip(self._names[key], self._at(tables, version).history, strict=True)
        ]

    @staticmethod
    def _at(tables: list[ScaleTable], version: int) -> ScaleTable:
        return tables[version % len(tables)]
