"""Forward only: evaluation on the placement of any schedule, with the newest weights.

    p=2, m=3     rank 0  F0 F1 F2 ..
                 rank 1  .. F0 F1 F2

Every micro-batch goes through one chunk before the next chunk begins, as in breadth-first order: no rank waits for a
chunk that comes round. Bidirectional placements evaluate on replica 0. No STEP, no activations kept; the version is
left open ("newest").
"""

from dataclasses import replace

from megalite.schedule.action import Action, forward
from megalite.schedule.program import Batch, Peak, Program


def forward_only(program: Program, num_microbatches: int | None = None) -> Program:
    """Evaluation for whoever trains with `program`: same placement, num_microbatches per batch (default: the same)."""
    placement = program.placement

    def order(rank: int, batch: Batch) -> list[Action]:
        stages = [stage for stage, replica in placement.stages_of(rank) if replica == 0]
        return [forward(stage, k) for stage in sorted(stages) for k in range(batch.start, batch.end)]

    return replace(
        program,
        name="forward-only",
        num_microbatches=num_microbatches or program.num_microbatches,
        order=order,
        weight_versions=(1,) * program.num_ranks,
        peak_activations=(Peak(0),) * program.num_ranks,
        staleness=(0,) * program.num_stages,
        asynchronous=False,
        update_per_microbatch=False,
        consistent=True,
        gradient_buffers=1,
        has_communication=False,
    )
