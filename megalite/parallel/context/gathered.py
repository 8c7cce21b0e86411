"""Attention to gathered keys and values (Llama 3, arXiv 2407.21783): one message of few groups instead of a ring.

They are gathered again in backward, so that no rank keeps them whole from forward to backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.comm import Axis, all_gather, reduce_scatter
from megalite.gradient import Node
from megalite.parallel.context.ring import AttentionKernel, empty_result, join_sinks, sink_gradient
from megalite.visibility import Visibility


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Visibility,
    order: Tensor,
    axis: Axis,
    kernel: AttentionKernel,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks.

    order: positions of the keys, rank after rank. sight: of keys at rising positions. The rest as `ring_attention`.
    """
    return _GatheredAttention.apply(q, k, v, sight, order, axis, kernel, sinks)


def _gathered(k: Tensor, v: Tensor, order: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """All ranks' `[k, b, g, d]` as `[size * k, b, g, d]` at rising positions."""
    whole = all_gather(torch.stack((k, v), 1), axis)[order.argsort()]
    return whole[:, 0], whole[:, 1]


class _GatheredAttention(Node):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sight: Visibility,
        order: Tensor,
        axis: Axis,
        kernel: AttentionKernel,
        sinks: Tensor | None,
    ) -> Tensor:
        operands = kernel.operands(q, *_gathered(k, v, order, axis))
        out, lse = empty_result(operands[0])
        kernel.forward(out, lse, operands, sight)
        lse = join_sinks(out, lse, sinks)
        y = kernel.result(out, q)
        ctx.save_for_backward(q, k, v, y, lse, sinks)
        ctx.sight, ctx.order, ctx.axis, ctx.kernel = sight, order, axis, kernel
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse, sinks = ctx.saved_tensors
        kernel, keys_values = ctx.kernel, _gathered(k, v, ctx.order, ctx.axis)
        operands = kernel.operands(q, *keys_values)
        grads = tuple(torch.zeros(x.shape, dtype=lse.dtype, device=q.device) for x in operands)
        dresult, delta = kernel.output_gradient(dy, y, q)
        kernel.backward(grads, dresult, delta, lse, operands, ctx.sight)
        dq, dkeys, dvalues = kernel.input_gradients(grads, (q, *keys_values))
        dk, dv = reduce_scatter(torch.stack((dkeys, dvalues), 1)[ctx.order], ctx.axis).unbind(1)
        return dq, dk, dv, None, None, None, None, sink_gradient(lse, dresult, delta, sinks)
