"""A logical tensor of a layer: its shape, and how a layout cuts it."""

import math
from dataclasses import dataclass

from megalite.config import ParallelConfig
from megalite.inventory.families import AXIS_FAMILIES
from megalite.inventory.parameter_placement import NO_AXES, ParameterPlacement, Shape


def share(extent: int, shards: int, multiple: int) -> int:
    """What one of `shards` holds of an extent that is padded to a multiple of `multiple` in each."""
    return -(-extent // (multiple * shards)) * multiple


@dataclass(frozen=True)
class Parameter:
    """One logical tensor of a layer.

    name: inside its layer; shape: without padding. cut: the dimension that the tensor axis (of experts: etp) cuts,
    None: every rank holds all of it. dealt: dimension 0 is dealt out over the axis ep (of experts, what is not is the
    same for all of them, and each rank computes its experts' share of the gradient). wide: kept in fp32 (or wider)
    whatever the others are in. multiple: each rank's part of that dimension is padded to it (vocabulary).
    partial: what a rank sees only its share of, so that gradients must be summed over the tensor axis: `sequence` (its
    tokens, under sequence parallelism), `heads` (its heads, or rows and columns of the matrix beside an adapter), or
    nothing.
    decay, init_std, init_value, family: as in `ParameterPlacement`.
    copy_of: name of the tensor of another layer that this is.
    frozen: it is not trained: adapters are.
    """

    name: str
    shape: Shape
    cut: int | None = None
    multiple: int = 1
    partial: str = ""
    decay: bool = True
    init_std: float | None = None
    init_value: float = 0.0
    family: str = "dense"
    dealt: bool = False
    wide: bool = False
    copy_of: str | None = None
    frozen: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def buffer(self) -> tuple[str, bool, bool]:
        """Parameters of which this is the same lie in flat buffers of their own."""
        return self.family, self.wide, self.frozen

    def local_shape(self, shards: int, ep: int = 1) -> Shape:
        """What one of `shards` tensor-parallel ranks, and of `ep` that share the experts, holds in memory."""
        local = list(self.shape)
        if self.cut is not None:
            local[self.cut] = share(local[self.cut], shards, self.multiple)
        if self.dealt:
            local[0] //= ep
        return tuple(local)

    def local(self, parallel: ParallelConfig) -> Shape:
        """What a rank of this layout holds in memory."""
        return self.local_shape(self.shards(parallel), parallel.experts.expert_model_parallel_size)

    def shards(self, parallel: ParallelConfig) -> int:
        """Ranks of the tensor axis that cuts it."""
        return parallel.expert_tensor_size if self.family == "expert" else parallel.tensor_model_parallel_size

    def place(
        self, shards: int, rank: int = 0, *, sequence_parallel: bool = False, ep: int = 1, ep_rank: int = 0
    ) -> ParameterPlacement:
        """Where the part of tensor-parallel rank `rank` of `shards`, and of rank `ep_rank` of `ep`, lies."""
        offset = [0] * len(self.shape)
        if self.cut is not None:
            offset[self.cut] = rank * self.local_shape(shards)[self.cut]
        if self.dealt:
            offset[0] = ep_rank * (self.shape[0] // ep)
        axes = frozenset(AXIS_FAMILIES[self.family].cut[:1]) if shards > 1 else NO_AXES
        shared = self.partial == "heads" or (self.partial == "sequence" and sequence_parallel)
        dealt = frozenset({"ep"}) if self.dealt and ep > 1 else NO_AXES
        apart = frozenset({"ep"}) if self.family == "expert" and not self.dealt and ep > 1 else NO_AXES
        return ParameterPlacement(
            self.shape,
            tuple(offset),
            sharded=(NO_AXES if self.cut is None else axes) | dealt,
            partial=(axes if shared else NO_AXES) | apart,
            decay=self.decay,
            init_std=self.init_std,
            init_value=self.init_value,
            family=self.family,
        )
