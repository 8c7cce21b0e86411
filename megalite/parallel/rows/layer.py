"""The word embedding as a layer, where its rows are on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from megalite.comm import Axis, reduce_from_axis, scatter_sum_sequence
from megalite.gradient import Node, WeightGradQueue
from megalite.microbatch import Microbatch
from megalite.parallel.rows.cached_rows import CachedRows


class HostEmbedding(nn.Module):
    """Token ids -> vectors. Each rank of the tensor axis has the rows of its part of the vocabulary; the sum over the
    axis completes the rest. It has no parameter: `CachedRows` holds, updates and saves them."""

    def __init__(self, rows: CachedRows, tp: Axis, queue: WeightGradQueue, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.rows, self.tp, self.queue, self.sequence_parallel = rows, tp, queue, sequence_parallel

    def forward(self, microbatch: Microbatch) -> Tensor:
        """-> `[s, b, h]` (`[s/t, b, h]` under sequence parallelism)."""
        host = microbatch.host_tokens
        ids = self.rows.own((microbatch.tokens.to("cpu") if host is None else host).t().numpy())
        x = _Read.apply(self.rows.weight, self.rows, ids, self.queue) if self.training else self.rows.read(ids)
        return scatter_sum_sequence(x, self.tp) if self.sequence_parallel else reduce_from_axis(x, self.tp)


class _Read(Node):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: CachedRows, ids: NDArray[np.int64], queue: WeightGradQueue) -> Tensor:
        ctx.rows, ctx.ids, ctx.queue = rows, ids, queue
        return rows.forward(ids)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        rows, ids = ctx.rows, ctx.ids
        ctx.queue.put(lambda: rows.backward(ids, dy))
        return None, None, None, None
