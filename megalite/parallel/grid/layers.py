"""What layers compute over a grid.

Of the products of a linear layer, what is gathered goes again as soon as a product has used it:

forward     Y = sum over the inner side of X W^T        gathers X and W, sums Y
backward    dX = dY W,  dW = dY^T X                     gathers dY, W and X again, sums dX and dW

LayerNorm and RMSNorm of tokens whose features several ranks share send two numbers a token each way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.comm import Axis, all_gather, all_reduce_
from megalite.gradient import Node, WeightGradQueue, add_product, sink_of, widened
from megalite.parallel.grid.exchange import gathered, summed


class Sides(NamedTuple):
    """The product of one layer, and its axes.

    out: cuts outputs; inputs are gathered over it. inner: cuts inputs; results are summed over it. tokens: the weight
    is gathered over it. parts: stacked projections, each cut by itself. dtype: of the products. queue: takes the
    computations of weight gradients. activation, activation_gradient: as of a row-parallel layer.
    """

    out: Axis
    inner: Axis
    tokens: Axis
    parts: int
    dtype: torch.dtype
    queue: WeightGradQueue
    activation: Callable[[Tensor], Tensor] | None
    activation_gradient: Callable[[Tensor, Tensor], Tensor] | None


def grid_product(x: Tensor, weight: Tensor, sides: Sides) -> Tensor:
    """x W^T, `[s, b/Z, in/P]` -> `[s, b/Z, parts * out/P]`, where P = X Y, of `activation(x)` if there is one.

    weight: `[out/(Y Z), in/X]`, or `[parts, ...]` of these.
    """
    return _Product.apply(x, weight, sides)


class _Product(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sides: Sides) -> Tensor:
        ctx.sides, ctx.sink = sides, sink_of(weight)
        ctx.save_for_backward(x, weight)
        whole = gathered(x if sides.activation is None else sides.activation(x), sides.out, -1)
        y = torch.matmul(whole.to(sides.dtype), _whole_weight(weight, sides).t()).to(x.dtype)
        return summed(y.unflatten(-1, (sides.parts, -1)), sides.inner, -1).flatten(-2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        sides: Sides = ctx.sides
        before, x = x, x if sides.activation is None else sides.activation(x)
        dy = gathered(dy.unflatten(-1, (sides.parts, -1)), sides.inner, -1).flatten(-2)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            addend = torch.matmul(dy.to(sides.dtype), _whole_weight(weight, sides)).to(dy.dtype)
            dx = summed(addend, sides.out, -1)
            if sides.activation_gradient is not None:
                dx = sides.activation_gradient(before, dx)
        if ctx.needs_input_grad[1]:
            gradient = partial(_weight_gradient, dy.flatten(0, -2), x.detach(), weight, sides)
            dweight = sides.queue.give(
                ctx.sink, lambda sink: sink.add(gradient().contiguous()), lambda: gradient().to(weight.dtype)
            )
        return dx, dweight, None


def _whole_weight(weight: Tensor, sides: Sides) -> Tensor:
    """`[parts * out/Y, in/X]`."""
    return gathered(weight, sides.tokens, -2).flatten(0, -2).to(sides.dtype)


def _weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, sides: Sides) -> Tensor:
    """dy^T x of `[n, parts * out/Y]` and `[s, b/Z, in/P]`, summed over the tokens of all ranks, in the wide dtype."""
    x = gathered(x, sides.out, -1).flatten(0, -2)
    wide = torch.promote_types(weight.dtype, torch.float32)
    total = torch.empty(dy.shape[1], x.shape[1], dtype=wide, device=dy.device)
    add_product(total, dy.to(sides.dtype).t(), x.to(sides.dtype), fresh=True)
    return summed(total.view(*weight.shape[:-2], -1, x.shape[1]), sides.tokens, -2)


def grid_norm(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, epsilon: float) -> Tensor:
    """Normalises `[..., h]` of which each rank has `[..., n]`; `[n]` weights, without a bias by the root of the mean
    square. In the wider of fp32 and x's dtype; the result has the weight's."""
    return _Norm.apply(x, weight, bias, axis, epsilon)


class _Norm(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, epsilon: float) -> Tensor:
        wide = widened(x)
        ctx.axis, ctx.total = axis, axis.size * x.shape[-1]
        if bias is None:
            mean, squares = None, wide.square().sum(-1, keepdim=True)
            all_reduce_(squares, axis)
        else:
            own = wide.mean(-1, keepdim=True)
            parts = all_gather(torch.stack((own, (wide - own).square().sum(-1, keepdim=True)))[None], axis)
            mean = parts[:, 0].mean(0)
            squares = (parts[:, 1] + x.shape[-1] * (parts[:, 0] - mean).square()).sum(0)
        scale = torch.rsqrt(squares / ctx.total + epsilon)
        ctx.save_for_backward(x, weight, mean, scale)
        y = (wide if mean is None else wide - mean) * scale * widened(weight)
        return (y if bias is None else y + widened(bias)).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        dy, wide = widened(dy), widened(x)
        normal = (wide if mean is None else wide - mean) * scale
        slope = dy * widened(weight)
        addends = (slope * normal, slope) if mean is not None else (slope * normal,)
        sums = torch.stack([each.sum(-1, keepdim=True) for each in addends])
        all_reduce_(sums, ctx.axis)
        sums /= ctx.total
        dx = slope - normal * sums[0]
        if mean is not None:
            dx -= sums[1]
        dweight, dbias = (each.flatten(0, -2).sum(0).to(weight.dtype) for each in (dy * normal, dy))
        return (dx * scale).to(x.dtype), dweight, None if mean is None else dbias, None, None
