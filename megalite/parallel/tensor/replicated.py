"""A linear layer that is whole on every rank: latent attention's narrow ones, and those of further tokens."""

from megalite.inventory import Parameter
from megalite.parallel.tensor.context import LayerContext
from megalite.parallel.tensor.linear import ColumnParallelLinear


class ReplicatedLinear(ColumnParallelLinear):
    """y = x A^T, `[s, b, in]` -> `[s, b, out]`, with the whole of A on every rank of the axis: each computes what it
    has, all tokens, or its part of them under sequence parallelism. Neither y nor its gradient is summed."""

    def __init__(self, weight: Parameter, ctx: LayerContext) -> None:
        super().__init__([weight], ctx, enters=False)
        self.products = ctx.products(tokens=ctx.tp if ctx.sequence_split else None)
