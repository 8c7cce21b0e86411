"""What the routers of all ranks did in one batch, as the numbers of a log line."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megalite.comm import ParallelMesh, all_reduce_
from megalite.config import Config
from megalite.microbatch_notes import EXTRA
from megalite.observe import ExpertStats
from megalite.train.build import Model, wide_dtype


class ExpertReport:
    """Adds up the loads of this rank's stages, and those of all ranks. Collective over the world; on a GPU beside the
    next batch."""

    def __init__(self, config: Config, model: Model, mesh: ParallelMesh, device: torch.device) -> None:
        self._given, self._model, self._mesh, self._device = config.model.experts, model, mesh, device
        self._dtype = wide_dtype(config)
        self._parts = 2 if config.parallel.tp_comm_overlap else 1  # a half notes its own means
        sparse = [index for index, sparse in enumerate(config.model.sparse_layers) if sparse]
        sparse += [
            config.model.num_layers + k for k in range(config.model.further.depth) if config.model.sparse_layers[-1]
        ]
        self._rows = {index: row for row, index in enumerate(sparse)}

    def __call__(self, microbatches: range) -> Callable[[], ExpertStats]:
        """Of a batch, by the numbers of this replica's micro-batches. What is returned gives it where it is shown."""
        number = self._given.num_experts or 0
        total = torch.zeros(len(self._rows), number + EXTRA, dtype=self._dtype, device=self._device)
        for stage in self._model.stages.values():
            for layer, load in stage.loads.take(microbatches).items():
                total[self._rows[layer]] += load
        handle = all_reduce_(total, self._mesh.world, async_op=self._device.type != "cpu")
        batches = len(microbatches) * self._mesh.size("stream") * self._parts

        def stats() -> ExpertStats:
            handle.wait()
            counts, (balance, z, dropped) = total[:, :number], total[:, number:].unbind(1)
            return ExpertStats(
                load_balancing_loss=balance.mean() / batches if self._given.balances else None,
                z_loss=z.mean() / batches if self._given.moe_z_loss_coeff > 0 else None,
                fullest_expert=(counts.amax(1) / counts.mean(1)).max(),
                dropped_fraction=dropped.sum() / counts.sum() if self._given.moe_expert_capacity_factor else None,
                expert_load=counts,
                layers=tuple(self._rows),
            )

        return stats
