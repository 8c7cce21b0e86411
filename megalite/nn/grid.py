"""The layers of a model whose tensor-parallel ranks form a grid (`parallel.grid`)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.comm import Axis, ParallelMesh, reduce_from_axis
from megalite.config import GridShape, ModelConfig
from megalite.gradient import widened
from megalite.inventory import Parameter, ParameterPlacement
from megalite.microbatch import Microbatch
from megalite.nn.activation import Activation
from megalite.nn.embedding import PositionEmbedding
from megalite.nn.halves import of_samples
from megalite.nn.head import Head, OutputLayer
from megalite.nn.kv_cache import LayerCache
from megalite.nn.norm import Norm
from megalite.nn.stack import LayerStack
from megalite.parallel.grid import (
    Grid,
    Sides,
    features_to_tokens,
    gather_parameter,
    grid_norm,
    grid_product,
    sum_to_features,
)
from megalite.parallel.tensor import LayerContext, Message, VocabParallelEmbedding, new_parameter, product_dtype

TENSOR = frozenset({"tp"})


def grid_layers(grid: Grid) -> Mapping[str, Callable[..., Any]]:
    """Makers of the layers of one grid by kind (`LayerContext.grid`); each takes what the layer takes in whose place it
    is. features: (size of the residual stream) -> this rank's part of it."""
    kinds = {"norm": GridNorm, "words": GridWords, "positions": GridPositions, "head": GridHead, "stack": GridStack}
    return {
        **{kind: partial(layer, grid) for kind, layer in kinds.items()},
        "column": partial(GridLinear, grid, True),
        "row": partial(GridLinear, grid, False),
        "features": grid.features,
    }


def on_grid(ctx: LayerContext, mesh: ParallelMesh, shape: GridShape) -> LayerContext:
    """The context in which the ranks of the tensor axis form a grid of this shape. Collective at first use."""
    grid = Grid.of(mesh, shape)
    return replace(ctx, tp=grid.columns, sharers=Axis.single("keys"), grid=grid_layers(grid))


class GridLinear(nn.Module):
    """y = x A^T + b, `[s, b/Z, in/P]` -> `[s, b/Z, parts * out/P]` with P = X Y; the arguments of
    `ColumnParallelLinear` and `RowParallelLinear`."""

    def __init__(
        self, grid: Grid, column: bool, parameters: Sequence[Parameter], ctx: LayerContext, *,
        activation: Activation | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        out, inner = (grid.outer, grid.inner) if column else (grid.inner, grid.outer)
        dtype = product_dtype(ctx.dtype, torch.device(ctx.device).type)
        (*stack, out_features, in_features), origin = parameters[0].shape, [0] * (len(parameters[0].shape) - 2)
        how = (math.prod(stack), dtype, ctx.weight_grads, *(activation or (None, None)))
        self.sides = Sides(out, inner, grid.tokens, *how)
        rows, width = out_features // (out.size * grid.tokens.size), in_features // inner.size
        begin = (out.rank * grid.tokens.size + grid.tokens.rank) * rows
        offset = (*origin, begin, inner.rank * width)
        place = ParameterPlacement(parameters[0].shape, offset, TENSOR, init_std=parameters[0].init_std)
        self.weight = new_parameter((*stack, rows, width), place, ctx)
        self.bias: nn.Parameter | None = None
        if len(parameters) > 1:
            own = out_features // grid.ranks.size
            part = (out.rank * inner.size + inner.rank) * grid.tokens.size + grid.tokens.rank
            place = ParameterPlacement((*stack, out_features), (*origin, part * own), TENSOR, decay=False)
            self.bias = new_parameter((*stack, own), place, ctx)

    def forward(self, x: Tensor, message: Message | None = None) -> Tensor:
        """Its messages go at once."""
        y = grid_product(x, self.weight, self.sides)
        return y if self.bias is None else y + gather_parameter(self.bias, self.sides.tokens, -1).flatten()


class GridNorm(Norm):
    """A norm of the residual stream, `[s, b/Z, h/P]`. Every rank has all weights and uses those of its features."""

    def __init__(self, grid: Grid, size: int, config: ModelConfig, ctx: LayerContext, *, split_input: bool) -> None:
        super().__init__(size, config, ctx, split_input=True)
        self.axis, self.own = grid.columns, grid.features(size)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight[self.own]
        bias = None if self.bias is None else self.bias[self.own]
        factor = 1.0 + widened(weight) if self.plus_one else weight
        return grid_norm(x, factor, bias, self.axis, self.epsilon).to(weight.dtype)


class GridWords(VocabParallelEmbedding):
    """The word embedding: ranks with the same samples share the vocabulary."""

    def __init__(self, grid: Grid, weight: Parameter, ctx: LayerContext) -> None:
        super().__init__(weight, replace(ctx, tp=grid.ranks))
        self.grid = grid

    def forward(self, ids: Tensor) -> Tensor:
        """int64 `[s, b/Z]` -> `[s, b/Z, h/P]`."""
        weight = gather_parameter(self.weight, self.grid.tokens, -2)
        return sum_to_features(self.own_rows(ids, weight, self.grid.columns), self.grid)


class GridPositions(PositionEmbedding):
    """Learned positions, of which each rank has all and uses its features."""

    def __init__(self, grid: Grid, config: ModelConfig, ctx: LayerContext) -> None:
        super().__init__(config, replace(ctx, sequence_parallel=True))
        self.split, self.own = False, grid.features(config.hidden_size)

    def forward(self, positions: Tensor) -> Tensor:
        """int64 `[s, b/Z]` -> `[s, b/Z, h/P]`."""
        return super().forward(positions)[..., self.own]


class GridHead(Head):
    """The head of the samples of a rank: it gets all features of a part of the sequence, as under sequence parallelism,
    and its loss is the sum over all samples of the micro-batch."""

    def __init__(self, grid: Grid, config: ModelConfig, ctx: LayerContext) -> None:
        super().__init__(config, replace(ctx, sequence_parallel=True))
        self.grid, self.output = grid, OutputLayer(config, replace(ctx, tp=grid.ranks))
        self.copies = [self.output] if self.copies else []

    @property
    def weight(self) -> Tensor:
        """Rows of the vocabulary, those of the ranks with other samples, too."""
        return gather_parameter(self.output.weight, self.grid.tokens, -2)

    def forward(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        """`[s, b/Z, h/P]` -> the loss of all Z parts of the micro-batch."""
        return reduce_from_axis(super().forward(features_to_tokens(x, self.grid), microbatch), self.grid.tokens)


class GridStack(LayerStack):
    """A stage that works on this rank's samples of each micro-batch."""

    def __init__(self, grid: Grid, *given: Any) -> None:
        super().__init__(*given)
        self.grid = grid

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> Tensor:
        return super().forward(*self._own(x, microbatch))

    def body(self, x: Tensor | None, microbatch: Microbatch, caches: Sequence[LayerCache] = ()) -> Tensor:
        return super().body(*self._own(x, microbatch), caches)

    def _own(self, x: Tensor | None, microbatch: Microbatch) -> tuple[Tensor | None, Microbatch]:
        count = microbatch.shape[0] // self.grid.tokens.size
        own = of_samples(microbatch, slice(self.grid.tokens.rank * count, (self.grid.tokens.rank + 1) * count))
        return None if x is None else x.reshape(-1, count, x.shape[-1]), own
