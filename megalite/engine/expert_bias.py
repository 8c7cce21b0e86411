"""Experts kept evenly loaded without a loss: each has a bias that helps to choose it, and every update moves it.

    b_e += rate * sign(mean load - load of e)           arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437

A load is how often the tokens of a batch choose an expert, before any is dropped, over all micro-batches and replicas.
The bias has neither gradient nor moments; otherwise it is a weight: part of a weight version and of a checkpoint, and
left alone by an update that is skipped. Every rank of a stage holds all of it.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megalite.comm import Axis, TensorShard
from megalite.engine.versioned import VersionedState
from megalite.nn import NamedBias, expert_biases
from megalite.parallel.pipeline import Stage
from megalite.schedule import StageKey


class ExpertBias(VersionedState):
    """The biases of this rank's stages, which routers read themselves. rate: what an update adds or takes away."""

    def __init__(self, stages: Mapping[StageKey, Stage], rate: float, axis: Axis, replicas: Mapping[int, Axis]) -> None:
        super().__init__(stages, axis, replicas)
        self.rate = rate

    @torch.no_grad()
    def step(self, wanted: Callable[[int], bool], found_inf: Tensor, version: int) -> None:
        for key, stage in sorted(self.stages.items()):
            old, new = self._biases(stage, version - 1), self._biases(stage, version)
            if not old:
                continue
            loads = stage.loads.sums(wanted)
            counts = torch.zeros(len(old), len(old[0].values), dtype=torch.int64, device=old[0].values.device)
            for row, bias in zip(counts, old, strict=True):
                if bias.layer in loads:
                    row.copy_(loads[bias.layer][: len(row)])
            self._over_ranks(key, counts)
            below_mean = (counts.sum(1, keepdim=True) - counts * counts.shape[1]).sign()
            for bias, before, direction in zip(new, old, below_mean, strict=True):
                moved = before.values.add(direction.to(before.values.dtype), alpha=self.rate)
                bias.values.copy_(torch.where(found_inf > 0, before.values, moved))

    def copy(self, version: int, target: int) -> None:
        for stage in self.stages.values():
            for bias, source in zip(self._biases(stage, target), self._biases(stage, version), strict=True):
                bias.values.copy_(source.values)

    def shards(self, version: int, prefix: str = "") -> list[TensorShard]:
        """The biases of a version as `<prefix><name>` (views)."""
        return [
            TensorShard(prefix + bias.name, tuple(bias.values.shape), (0,), bias.values, self.axis.rank + key[1])
            for key, stage in self.stages.items()
            for bias in self._biases(stage, version)
        ]

    def _biases(self, stage: Stage, version: int) -> list[NamedBias]:
        return expert_biases(stage.module(version))
