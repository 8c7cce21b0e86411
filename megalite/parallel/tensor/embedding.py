"""The word embedding cut over the tensor axis by rows of the vocabulary (Megatron-LM, arXiv 1909.08053)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm import Axis, reduce_from_axis, scatter_sum_sequence
from megalite.gradient import Node, WeightGradQueue, sink_of
from megalite.inventory import WORD_EMBEDDINGS, Parameter
from megalite.parallel.tensor.context import LayerContext, parameter_of


class VocabParallelEmbedding(nn.Module):
    """Token ids -> vectors. Each rank looks up the ids it owns; the sum over the axis completes the rest. Rows of the
    weight (`inventory.vocabulary`) beyond the vocabulary are padding: zero, never stored or trained."""

    def __init__(self, weight: Parameter, ctx: LayerContext) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = ctx.tp, ctx.sequence_parallel
        self.weight_grads = ctx.weight_grads
        self.weight = parameter_of(weight, ctx)
        self.weight.logical_name = WORD_EMBEDDINGS  # type: ignore[attr-defined]  # ours, on a tensor of torch's

    def forward(self, ids: Tensor) -> Tensor:
        """int64 `[s, b]` -> `[s, b, h]` (`[s/t, b, h]` under sequence parallelism)."""
        x = self.own_rows(ids, self.weight, self.tp)
        return scatter_sum_sequence(x, self.tp) if self.sequence_parallel else reduce_from_axis(x, self.tp)

    def own_rows(self, ids: Tensor, weight: Tensor, axis: Axis) -> Tensor:
        """Vectors of the ids that are among this rank's rows, zeros of others."""
        if axis.size == 1:
            return lookup(ids, weight, self.weight_grads)
        rows = len(weight)
        ids = ids - axis.rank * rows
        own = (ids >= 0) & (ids < rows)
        return lookup(ids.clamp(0, rows - 1), weight, self.weight_grads) * own[..., None]


def lookup(ids: Tensor, weight: Tensor, queue: WeightGradQueue) -> Tensor:
    """`weight[ids]`, `[..., h]`; the gradient goes to the weight's sink where it has one."""
    return _Lookup.apply(ids, weight, queue)


class _Lookup(Node):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, queue: WeightGradQueue) -> Tensor:
        ctx.sink, ctx.queue, ctx.rows = sink_of(weight), queue, weight.shape[0]
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        sink = ctx.sink
        if sink is None:
            return None, torch.ops.aten.embedding_dense_backward(dy, ids, ctx.rows, -1, False), None

        def accumulate() -> None:
            sink.grad.index_add_(0, ids.flatten(), dy.reshape(-1, dy.shape[-1]).to(sink.grad.dtype))
            sink.done()

        ctx.queue.put(accumulate, sink)
        return None, None, None
