"""Collectives that autograd understands: each one's backward is its conjugate.

    forward             backward            name                      paper
    identity            all-reduce          copy_to_axis     (f)      Megatron-LM, arXiv 1909.08053
    all-reduce          identity            reduce_from_axis (g)      Megatron-LM
    all-gather dim 0    reduce-scatter      gather_sequence  (g-bar)  sequence parallelism, arXiv 2205.05198
    reduce-scatter      all-gather dim 0    scatter_sum_sequence      sequence parallelism

Activations are sequence first (`[s, b, h]`), so all of them work on dim 0 and need no copy. Over an axis of size 1
they are the identity.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from megalite.comm import collectives
from megalite.comm.mesh import Axis


class _CopyToAxis(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return collectives.all_reduce(dy, ctx.axis), None


class _ReduceFromAxis(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return collectives.all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return collectives.all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return collectives.reduce_scatter(dy, ctx.axis), None


class _ScatterSumSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return collectives.reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return collectives.all_gather(dy, ctx.axis), None


def own_slice(x: Tensor, axis: Axis) -> Tensor:
    """This rank's `1 / size` of dim 0 (a view)."""
    part = x.shape[0] // axis.size
    return x[axis.rank * part : (axis.rank + 1) * part]


def copy_to_axis(x: Tensor, axis: Axis) -> Tensor:
    """Megatron's f: every rank uses x; its gradient is the sum of theirs."""
    return x if axis.size == 1 else _CopyToAxis.apply(x, axis)


def reduce_from_axis(x: Tensor, axis: Axis) -> Tensor:
    """Megatron's g: the sum of the ranks' partial results; each gets the whole gradient."""
    return x if axis.size == 1 else _ReduceFromAxis.apply(x, axis)


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """`[s/t, ...]` -> `[s, ...]` before a column-parallel product; the partial gradients are reduce-scattered."""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)


def scatter_sum_sequence(x: Tensor, axis: Axis) -> Tensor:
    """`[s, ...]` partial -> `[s/t, ...]` summed, after a row-parallel product."""
    return x if axis.size == 1 else _ScatterSumSequence.apply(x, axis)
