"""Products of many experts: rows of one expert after the other, times that expert's matrix.

On a device all of them are one kernel where torch has it (`F.grouped_mm`), forward and backward to the input; the
gradients of the weights are products one by one, whose sums are kept in fp32.

As the other linear layers do, backward adds weight gradients straight into the main gradient, or puts them aside
(`megalite.gradient`), and computes an activation before the product again.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.gradient import Node, WeightGradQueue, sink_of, sum_widened
from megalite.parallel.expert.plan import RowCounts

logger = logging.getLogger(__name__)

Pairs = list[tuple[Tensor, Tensor]]


class ElementwiseFunction(Protocol):
    """An activation in front of a product, elementwise in its rows."""

    def of(self, x: Tensor) -> Tensor: ...

    def backward(self, x: Tensor, dy: Tensor, dx: Tensor | None) -> Tensor:
        """Computes it again: returns `of(x)`, and writes the gradient of x into dx. dy: may be overwritten."""
        ...


def add_biases(y: Tensor, biases: Tensor, experts: Tensor) -> None:
    """Adds to each row of y `[m, n]` what its expert has of `[E, n]`."""
    y += biases[experts]


@dataclass(eq=False)
class GroupedProduct:
    """weight_grads: where weight gradients are put. dtype: what is multiplied in. adds_bias: False where another rank
    adds it to the sum. add_biases: perhaps compiled."""

    weight_grads: WeightGradQueue
    dtype: torch.dtype
    adds_bias: bool = True
    add_biases: Callable[[Tensor, Tensor, Tensor], None] = add_biases

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        counts: RowCounts,
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
        counts: RowCounts,
        product: GroupedProduct,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.activation, ctx.counts, ctx.product = activation, counts, product
        ctx.sinks = sink_of(weight), None if bias is None else sink_of(bias)
        matrices = weight.flatten(1, -2).mT  # [E, in, ... * out]
        if by_one_kernel(x, weight, product.dtype):
            y = F.grouped_mm(x if activation is None else activation.of(x), matrices, offs=counts.ends)
        else:
            y = x.new_empty(len(x), matrices.shape[2])
            for rows, some in _pieces(counts, x):
                taken = x[rows] if activation is None else activation.of(x[rows])
                _products(taken, matrices[some], counts.on_host[some], product.dtype, y[rows])
        if bias is not None and product.adds_bias:
            product.add_biases(y, bias.detach().flatten(1), counts.experts)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        product: GroupedProduct = ctx.product
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        backward = _by_one_kernel if by_one_kernel(dy, weight, product.dtype) else _piece_by_piece
        # detached: what is postponed must not keep the graph alive
        taken = backward(ctx, x.detach(), dy, weight.flatten(1, -2), dx)
        dweight = _weight_gradient(ctx, taken, weight) if ctx.needs_input_grad[1] else None
        dbias = None if bias is None or not ctx.needs_input_grad[2] else _bias_gradient(ctx, dy, bias)
        return dx, dweight, dbias, None, None, None


def _by_one_kernel(ctx: Any, x: Tensor, dy: Tensor, matrices: Tensor, dx: Tensor | None) -> Pairs:
    """Writes the gradient of x into dx; returns every expert's (inputs of its product, gradients of its results)."""
    inner = x
    if ctx.activation is not None:
        inner = ctx.activation.backward(x, F.grouped_mm(dy, matrices, offs=ctx.counts.ends), dx)
    elif dx is not None:
        dx.copy_(F.grouped_mm(dy, matrices, offs=ctx.counts.ends))
    return list(zip(inner.split(ctx.counts.on_host), dy.split(ctx.counts.on_host), strict=True))


def _piece_by_piece(ctx: Any, x: Tensor, dy: Tensor, matrices: Tensor, dx: Tensor | None) -> Pairs:
    """As `_by_one_kernel`, a product an expert."""
    taken: Pairs = []
    for rows, some in _pieces(ctx.counts, x):
        inner, counts = x[rows], ctx.counts.on_host[some]
        if ctx.activation is None:
            if dx is not None:
                _products(dy[rows], matrices[some], counts, ctx.product.dtype, dx[rows])
        else:
            gradient = dy.new_empty(len(inner), matrices.shape[2])
            _products(dy[rows], matrices[some], counts, ctx.product.dtype, gradient)
            inner = ctx.activation.backward(inner, gradient, None if dx is None else dx[rows])
        taken += zip(inner.split(counts), dy[rows].split(counts), strict=True)
    return taken


def by_one_kernel(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the products of all experts are one kernel: of bf16 on a device, with rows of whole 16 bytes."""
    if x.device.type == "cpu" or len(x) == 0:
        return False
    narrow = x.dtype == weight.dtype == dtype == torch.bfloat16
    whole = weight.shape[-1] % 8 == math.prod(weight.shape[1:-1]) % 8 == 0
    return narrow and whole and grouped_works(x.device)


@functools.cache
def grouped_works(device: torch.device) -> bool:
    """Tries the kernel beside products one by one; an expert in between has no rows."""
    x, weight = torch.arange(96.0).view(6, 16).sin(), torch.arange(3 * 8 * 16.0).view(3, 8, 16).cos()
    x, weight = (value.to(device, torch.bfloat16) for value in (x, weight))
    ends = torch.tensor([4, 4, 6], dtype=torch.int32, device=device)
    try:
        found = F.grouped_mm(x, weight.mT, offs=ends), F.grouped_mm(x @ weight[0].mT, weight, offs=ends)
        dy = x @ weight[0].mT
        expected = [torch.cat([a[:4] @ w[0], a[4:] @ w[2]]) for a, w in ((x, weight.mT), (dy, weight))]
        if all(torch.allclose(y, z, rtol=0.02, atol=0.1) for y, z in zip(found, expected, strict=True)):
            return True
        why: object = "the library's kernel gives other numbers"
    except Exception as error:  # whatever a library that cannot do it raises
        why = error
    logger.warning("experts are multiplied one by one: %s", why)
    return False


def _pieces(counts: RowCounts, x: Tensor) -> Iterator[tuple[slice, slice]]:
    """(Rows, experts) that are computed at once: everything, but on a CPU one expert after the other, in its cache."""
    if x.device.type != "cpu":
        yield slice(None), slice(None)
        return
    start = 0
    for expert, count in enumerate(counts.on_host):
        yield slice(start, start + count), slice(expert, expert + 1)
        start += count


def _products(x: Tensor, matrices: Tensor, counts: Sequence[int], dtype: torch.dtype, y: Tensor) -> None:
    """y = the rows of each expert times its matrix, `[sum(counts), n]` and `[E, n, m]` -> `[sum(counts), m]`."""
    for rows, matrix, out in zip(x.split(counts), matrices, y.split(counts), strict=True):
        if x.dtype == dtype:
            torch.mm(rows, matrix, out=out)
        else:
            out.copy_(torch.mm(rows.to(dtype), matrix.to(dtype)))


def _weight_gradient(ctx: Any, taken: Pairs, weight: Tensor) -> Tensor | None:
    """dy_e^T x_e of every expert's (x_e, dy_e), into the sink (and then None) or returned."""
    product: GroupedProduct = ctx.product

    def pairs() -> list[tuple[Tensor, Tensor]]:
        return [(dy.to(product.dtype).t(), x.to(product.dtype)) for x, dy in taken]

    return product.weight_grads.give(
        ctx.sinks[0],
        lambda sink: sink.addmm_each(pairs()),
        lambda: torch.stack([torch.mm(a, b) for a, b in pairs()]).to(weight.dtype).view(weight.shape),
    )


def _bias_gradient(ctx: Any, dy: Tensor, bias: Tensor) -> Tensor | None:
    """The sum of dy over the rows of every expert, into the sink or returned."""
    counts, shape = ctx.counts.on_host, bias.shape
    queue: WeightGradQueue = ctx.product.weight_grads

    def sums() -> Tensor:
        return torch.stack([sum_widened(rows) for rows in dy.split(counts)]).view(shape)

    return queue.give(ctx.sinks[1], lambda sink: sink.add(sums()), lambda: sums().to(bias.dtype))
