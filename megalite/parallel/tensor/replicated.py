"""A linear layer that the tensor axis does not cut."""

from __future__ import annotations

from dataclasses import replace

from megalite.comm import Axis
from megalite.inventory import NO_AXES, ParameterPlacement, placement_of
from megalite.parallel.tensor.context import LayerContext
from megalite.parallel.tensor.linear import ColumnParallelLinear


class ReplicatedLinear(ColumnParallelLinear):
    """y = x A^T, `[s, b, in]` -> `[s, b, out]`, with the whole of A on every rank of the axis: each computes what it
    has, all tokens, or its part of them under sequence parallelism. Neither y nor its gradient is summed."""

    def __init__(self, in_features: int, out_features: int, *, init_std: float, ctx: LayerContext) -> None:
        alone = replace(ctx, tp=Axis.single("tp"), sequence_parallel=False)
        super().__init__(in_features, out_features, bias=False, init_std=init_std, ctx=alone)
        self.products = ctx.products(tokens=ctx.tp if ctx.sequence_split else None)
        partial = ctx.tp.names if ctx.sequence_split else NO_AXES
        place: ParameterPlacement = replace(placement_of(self.weight), partial=partial)
        self.weight.placement = place  # type: ignore[attr-defined]  # ours, on a tensor of torch's
