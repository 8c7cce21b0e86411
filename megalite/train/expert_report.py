"""What the routers of all ranks did in one batch, as the numbers of a log line."""

from collections.abc import Callable

import torch

from megalite.comm import ParallelMesh, all_reduce_
from megalite.config import Config
from megalite.microbatch_notes import EXTRA
from megalite.observe import ExpertStats
from megalite.train.build import Model, wide_dtype


def expert_report(
    config: Config, model: Model, mesh: ParallelMesh, device: torch.device
) -> Callable[[range], Callable[[], ExpertStats]]:
    """What adds up the loads of a batch, by the numbers of this replica's micro-batches: those of this rank's stages
    and of all ranks. Collective over the world; on a GPU beside the next batch. What it returns gives them where they
    are shown."""
    given, dtype, number = config.model.experts, wide_dtype(config), config.model.experts.num_experts or 0
    parts = 2 if config.parallel.tp_comm_overlap else 1  # a half notes its own means
    sparse = [index for index, sparse in enumerate(config.model.sparse_layers) if sparse]
    sparse += [config.model.num_layers + k for k in range(config.model.further.depth) if config.model.sparse_layers[-1]]
    rows = {index: row for row, index in enumerate(sparse)}

    def report(microbatches: range) -> Callable[[], ExpertStats]:
        total = torch.zeros(len(rows), number + EXTRA, dtype=dtype, device=device)
        for stage in model.stages.values():
            for layer, load in stage.loads.take(microbatches).items():
                total[rows[layer]] += load
        handle = all_reduce_(total, mesh.world, async_op=device.type != "cpu")
        batches = len(microbatches) * mesh.size("stream") * parts

        def stats() -> ExpertStats:
            handle.wait()
            counts, (balance, z, dropped) = total[:, :number], total[:, number:].unbind(1)
            return ExpertStats(
                load_balancing_loss=balance.mean() / batches if given.balances else None,
                z_loss=z.mean() / batches if given.moe_z_loss_coeff > 0 else None,
                fullest_expert=(counts.amax(1) / counts.mean(1)).max(),
                dropped_fraction=dropped.sum() / counts.sum() if given.moe_expert_capacity_factor else None,
                expert_load=counts,
                layers=tuple(rows),
            )

        return stats

    return report
