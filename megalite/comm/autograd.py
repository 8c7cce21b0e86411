"""Collectives with a backward, which is the conjugate collective.

    forward             backward            name                      paper
    all-reduce          identity            reduce_from_axis (g)      Megatron-LM, arXiv 1909.08053
    identity            all-reduce          copy_to_axis (f)
    reduce-scatter      all-gather dim 0    scatter_sum_sequence      sequence parallelism, arXiv 2205.05198
    all-gather          reduce-scatter      gather_sequence

Activations are sequence first (`[s, b, h]`), so all work on dim 0 without a copy. Over an axis of size 1 they are the
identity. Linear layers have collectives of their own in their backward, hidden by products (`parallel.tensor.linear`).
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from torch.autograd import Function

from megalite.comm.axis import Axis
from megalite.comm.collectives import all_gather, all_reduce, reduce_scatter

Collective = Callable[[Tensor, Axis], Tensor]


class _Conjugates(Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch's own has no type

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: Collective, backward: Collective) -> Tensor:
        ctx.axis, ctx.conjugate = axis, backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.conjugate(dy, ctx.axis), None, None, None


def conjugates(x: Tensor, over: Any, forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Tensor:
    """`forward(x, over)`, whose gradient is `backward(dy, over)`."""
    return _Conjugates.apply(x, over, forward, backward)


def same(x: Tensor, axis: Axis) -> Tensor:
    """x, for `conjugates`, as a view: autograd wants another tensor."""
    return x.view_as(x)


def own_slice(x: Tensor, axis: Axis) -> Tensor:
    """This rank's `1 / size` of dim 0 (a view)."""
    part = x.shape[0] // axis.size
    return x[axis.rank * part : (axis.rank + 1) * part]


def reduce_from_axis(x: Tensor, axis: Axis) -> Tensor:
    """Megatron's g: the sum of the ranks' partial results; each gets the whole gradient."""
    return x if axis.size == 1 else _Conjugates.apply(x, axis, all_reduce, same)


def scatter_sum_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Partial sums `[s, ...]` -> the sum `[s/t, ...]`, after a row-parallel product."""
    return x if axis.size == 1 else _Conjugates.apply(x, axis, reduce_scatter, all_gather)


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """`[n, ...]` -> `[size * n, ...]`; the gradients of all ranks are summed."""
    return x if axis.size == 1 else _Conjugates.apply(x, axis, all_gather, _scatter_sum)


def _scatter_sum(x: Tensor, axis: Axis) -> Tensor:
    return reduce_scatter(x.contiguous(), axis)


def copy_to_axis(x: Tensor, axis: Axis) -> Tensor:
    """Megatron's f: x as it is, before products of which each rank computes a part."""
    return x if axis.size == 1 else _Conjugates.apply(x, axis, same, all_reduce)
