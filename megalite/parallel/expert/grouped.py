"""Products of many experts: rows of one expert after the other, times that expert's matrix.

As the other linear layers do, backward adds weight gradients straight into the main gradient, or puts them aside
(`megalite.gradient`), and computes an activation before the product again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.gradient import Node, WeightGradQueue, sink_of, sum_widened


class ElementwiseFunction(Protocol):
    """An activation in front of a product, elementwise in its rows."""

    def of(self, x: Tensor) -> Tensor: ...

    def backward(self, x: Tensor, dy: Tensor, dx: Tensor | None) -> Tensor:
        """Computes it again: returns `of(x)`, and writes the gradient of x into dx. dy: may be overwritten."""
        ...


@dataclass(frozen=True)
class GroupedProduct:
    """weight_grads: where weight gradients are put. dtype: what is multiplied in. adds_bias: False where another rank
    adds it to the sum."""

    weight_grads: WeightGradQueue
    dtype: torch.dtype
    adds_bias: bool = True

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        counts: Sequence[int],
        activation: ElementwiseFunction | None = None,
    ) -> Tensor:
        """`[sum(counts), in]`, weights `[E, ..., out, in]`, biases `[E, ..., out]` -> `[sum(counts), ... * out]`.

        activation: of the input, elementwise in its rows; what it takes is kept, and it is computed again in backward.
        """
        return _Grouped.apply(x, weight, bias, activation, counts, self)


class _Grouped(Node):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: ElementwiseFunction | None,
        counts: Sequence[int],
        product: GroupedProduct,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.activation, ctx.counts, ctx.product = activation, counts, product
        ctx.sinks = sink_of(weight), None if bias is None else sink_of(bias)
        matrices = _matrices(weight).mT
        y = x.new_empty(len(x), matrices.shape[2])
        for rows, some in _pieces(counts, x):
            taken = x[rows] if activation is None else activation.of(x[rows])
            _products(taken, matrices[some], counts[some], product.dtype, y[rows])
        if bias is not None and product.adds_bias:
            y += bias.flatten(1).repeat_interleave(_repeats(counts, y), 0)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        product: GroupedProduct = ctx.product
        matrices = _matrices(weight)
        taken: list[tuple[Tensor, Tensor]] = []
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        for rows, some in _pieces(ctx.counts, x):
            inner, counts = x[rows].detach(), ctx.counts[some]  # what is postponed must not keep the graph alive
            if ctx.activation is None:
                if dx is not None:
                    _products(dy[rows], matrices[some], counts, product.dtype, dx[rows])
            else:
                gradient = dy.new_empty(len(inner), matrices.shape[2])
                _products(dy[rows], matrices[some], counts, product.dtype, gradient)
                inner = ctx.activation.backward(inner, gradient, None if dx is None else dx[rows])
            taken += zip(inner.split(counts), dy[rows].split(counts), strict=True)
        dweight = _weight_gradient(ctx, taken, weight) if ctx.needs_input_grad[1] else None
        dbias = None if bias is None or not ctx.needs_input_grad[2] else _bias_gradient(ctx, dy, bias)
        return dx, dweight, dbias, None, None, None


def _pieces(counts: Sequence[int], x: Tensor) -> Iterator[tuple[slice, slice]]:
    """(Rows, experts) that are computed at once: everything, but on a CPU one expert after the other, in its cache."""
    if x.device.type != "cpu":
        yield slice(None), slice(None)
        return
    start = 0
    for expert, count in enumerate(counts):
        yield slice(start, start + count), slice(expert, expert + 1)
        start += count


def _matrices(weight: Tensor) -> Tensor:
    """`[E, ..., out, in]` -> `[E, ... * out, in]`."""
    return weight.flatten(1, -2)


def _products(x: Tensor, matrices: Tensor, counts: Sequence[int], dtype: torch.dtype, y: Tensor) -> None:
    """y = the rows of each expert times its matrix, `[sum(counts), n]` and `[E, n, m]` -> `[sum(counts), m]`."""
    for rows, matrix, out in zip(x.split(counts), matrices, y.split(counts), strict=True):
        if x.dtype == dtype:
            torch.mm(rows, matrix, out=out)
        else:
            out.copy_(torch.mm(rows.to(dtype), matrix.to(dtype)))


def _repeats(counts: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(counts, device=like.device)


def _weight_gradient(ctx: Any, taken: Sequence[tuple[Tensor, Tensor]], weight: Tensor) -> Tensor | None:
    """dy_e^T x_e of every expert's (x_e, dy_e), into the sink (and then None) or returned."""
    product, sink = ctx.product, ctx.sinks[0]

    def pairs() -> list[tuple[Tensor, Tensor]]:
        return [(dy.to(product.dtype).t(), x.to(product.dtype)) for x, dy in taken]

    if sink is None:
        return torch.stack([torch.mm(a, b) for a, b in pairs()]).to(weight.dtype).view(weight.shape)
    product.weight_grads.put(lambda: sink.addmm_each(pairs()))
    return None


def _bias_gradient(ctx: Any, dy: Tensor, bias: Tensor) -> Tensor | None:
    """The sum of dy over the rows of every expert, into the sink or returned."""
    counts, sink = ctx.counts, ctx.sinks[1]

    def sums() -> Tensor:
        return torch.stack([sum_widened(rows) for rows in dy.split(counts)]).view(bias.shape)

    if sink is None:
        return sums().to(bias.dtype)
    ctx.product.weight_grads.put(lambda: sink.add(sums()))
    return None
