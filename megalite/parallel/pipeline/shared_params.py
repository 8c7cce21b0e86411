"""Tied embeddings across stages: one logical tensor, several copies, one gradient.

With tied embeddings the first stage uses the word embedding for the lookup, and the last uses it as output layer. If
these are different stages, each holds a copy. All copies start equal; the gradient of the logical tensor is the sum
over the copies, and each copy must get the same update, so the sum is computed before the norm and the step:

    local copies summed  ->  all-reduce over the pipeline ranks that hold a copy  ->  written back into every local copy

ZB-V and DualPipe-V hold both ends on one rank (no message at all), Chimera holds both ends on both outer ranks.
"""

from collections.abc import Sequence

from torch import Tensor

from megalite.comm import Axis, Done, Exchange, Handle, ParallelMesh, all_reduce_
from megalite.schedule import StagePlacement


def holders(placement: StagePlacement) -> list[int]:
    """Pipeline ranks that hold the first or the last stage of any replica, ascending."""
    ends = (0, placement.num_stages - 1)
    return sorted({placement.rank_of(stage, replica) for replica in range(placement.num_replicas) for stage in ends})


def start_shared_sum(axis: Axis, copies: Sequence[Tensor]) -> Handle:
    """Sums the gradients of a tied parameter's copies in place: those of this rank, and over the axis through the ranks
    of `holders` (size 1 where one rank holds all). The result is in all of them behind the handle."""
    if not copies:
        return Done()
    total, *others = copies
    for gradient in others:
        total.add_(gradient)

    def copy() -> None:
        for gradient in others:
            gradient.copy_(total)

    return Exchange([all_reduce_(total, axis, async_op=True)], [], copy)


def replica_axes(mesh: ParallelMesh, placement: StagePlacement) -> dict[int, Axis]:
    """For schedules that hold a stage more than once (Chimera): stage -> the axis through its holders."""
    if placement.num_replicas == 1:
        return {}
    axes = {}
    for stage in range(placement.num_stages):
        ranks = sorted({placement.rank_of(stage, replica) for replica in range(placement.num_replicas)})
        axes[stage] = mesh.through(ranks, apart=f"stage{stage}")
    return {stage: axis for stage, axis in axes.items() if axis.size > 1}
