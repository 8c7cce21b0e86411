"""Tied embeddings across stages: one logical tensor, several copies, one gradient.

With tied embeddings the word embedding is used by the first stage (lookup) and by the last (output layer). Where the
two are different stages each holds a copy. All copies start equal; the gradient of the logical tensor is the sum
over the copies, and each copy must take the same update, so the sum is made before the norm and the step:

    local copies summed  ->  all-reduce over the pipeline ranks that hold a copy  ->  written back into every local copy

ZB-V and DualPipe-V hold both ends on one rank (no message at all), Chimera holds both ends on both outer ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megalite.comm import Axis, Done, Handle, all_reduce_
from megalite.schedule import StagePlacement


def holders(placement: StagePlacement) -> list[int]:
    """Pipeline ranks that hold the first or the last stage of any replica, ascending."""
    ends = (0, placement.num_stages - 1)
    return sorted({placement.rank_of(stage, replica) for replica in range(placement.num_replicas) for stage in ends})


class SharedGradient:
    """Sums the gradient of one tied parameter over its copies.

    axis: through the ranks of `holders` (size 1 on ranks that hold no copy, or where one rank holds all of them).
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def start_sum(self, local_copies: Sequence[Tensor]) -> Handle:
        """Every copy's gradient becomes the sum over all copies, in place, when the handle is waited for."""
        if not local_copies:
            return Done()
        total, *others = local_copies
        for gradient in others:
            total.add_(gradient)
        return _Sum(all_reduce_(total, self._axis, async_op=True), total, others)


@dataclass(frozen=True)
class _Sum:
    """A sum under way."""

    work: Handle
    total: Tensor
    others: Sequence[Tensor]

    def wait(self) -> None:
        self.work.wait()
        for gradient in self.others:
            gradient.copy_(self.total)
