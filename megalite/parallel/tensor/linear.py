"""Linear layers cut over the tensor axis: by output columns before a nonlinearity, by input rows after it.

Megatron-LM (arXiv 1909.08053) pairs them so that a block needs two sums forward and two backward; sequence
parallelism (arXiv 2205.05198) splits each sum into a reduce-scatter and an all-gather around the parts of the block
that work token by token.

    x  --f-->  [ x A_i ]  -->  nonlinearity  -->  [ y B_i ]  --g-->  sum over i

Backward hides the messages: while the gradient of the input is in flight, the weight gradient is computed and added
straight into the parameter's main-gradient buffer (`GradSink`), unless the executor has asked for it to be postponed
(`WeightGradQueue`).

A nonlinearity in front of a row-parallel layer is fused into it and recomputed in backward. Its output would be a fifth
of the activations that a block keeps (4 of 21 s b h with GELU at 512 tokens); recomputation costs one elementwise pass.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from megalite.comm import Axis, Done, Handle, all_gather_into
from megalite.gradient import Node, sink_of, sum_widened
from megalite.inventory import Parameter
from megalite.parallel.tensor.adapters import Adapters
from megalite.parallel.tensor.context import LayerContext, weight_and_bias
from megalite.parallel.tensor.late_messages import Message, start_sum
from megalite.parallel.tensor.products import Products

Layer = TypeVar("Layer")
Activation = Callable[[Tensor], Tensor]
"""Elementwise in the channels that each rank holds: `[..., parts * n]` -> `[..., n]`."""
WithGradient = tuple[Activation, Callable[[Tensor, Tensor], Tensor]]


class ColumnParallelLinear(nn.Module):
    """y = x A^T + b with the rows of A (columns of A^T) cut over the axis: `[s, b, in]` -> `[s, b, out/t]`.

    Under sequence parallelism the input is `[s/t, b, in]`. It is gathered here, and again in backward, so that it is
    never stored whole.

    enters: False: the input is whole already, and its gradient is summed by `enter_parallel`, which made it so.
    parameters: `inventory.column`. A leading dimension of them stacks several projections of the same input, each cut
        by itself (gate and value of a gated MLP): the weight is `[parts, out/t, in]`, and the result `[s, b, parts *
        out/t]` holds the parts one after the other.
    """

    def __init__(self, parameters: Sequence[Parameter], ctx: LayerContext, *, enters: bool = True) -> None:
        super().__init__()
        self.tp = ctx.tp if enters else Axis.single("tp")
        self.sequence_parallel = ctx.sequence_parallel
        self.weight_grads = ctx.weight_grads
        self.products = ctx.products(outputs=ctx.tp)
        self.adapters: Adapters | None = None
        self.weight, self.bias = weight_and_bias(parameters, ctx)

    def forward(self, x: Tensor, message: Message | None = None) -> Tensor:
        """`[s, b, in]` (`[s/t, b, in]` under sequence parallelism) -> `[s, b, parts * out/t]`."""
        adapters = () if self.adapters is None else self.adapters.weights()
        return _ColumnLinear.apply(x, self.weight, self.bias, self, message or Message(), *adapters)


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x_i B_i^T, plus b: `[s, b, in/t]` -> `[s, b, out]` (`[s/t, b, out]` under sequence
    parallelism).

    Only the first rank adds the bias, so that the sum contains it once.

    parameters: `inventory.row`.
    activation: applied to the input first; only the input is kept for backward, unless `keeps_activated` is set. With
        it comes (its input, gradient of its result) -> gradient of its input.
    """

    def __init__(
        self, parameters: Sequence[Parameter], ctx: LayerContext, *, activation: WithGradient | None = None
    ) -> None:
        super().__init__()
        self.activation: Activation | None = None if activation is None else activation[0]
        self.activation_gradient = None if activation is None else activation[1]
        self.keeps_activated = False
        self.tp, self.sequence_parallel = ctx.tp, ctx.sequence_parallel
        self.weight_grads = ctx.weight_grads
        self.products = ctx.products(inputs=ctx.tp)
        self.adapters: Adapters | None = None
        self.weight, self.bias = weight_and_bias(parameters, ctx)

    def forward(self, x: Tensor, message: Message | None = None) -> Tensor:
        """`[s, b, in/t]` (before `activation`, if there is one) -> `[s, b, out]` (`[s/t, b, out]` under sequence
        parallelism)."""
        activation = self.activation
        if activation is not None and self.keeps_activated:
            x, activation = activation(x), None
        adapters = () if self.adapters is None else self.adapters.weights()
        return _RowLinear.apply(x, self.weight, self.bias, activation, self, message or Message(), *adapters)


Linear = ColumnParallelLinear | RowParallelLinear


class _ColumnLinear(Node):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Linear, message: Message, *adapters: Tensor
    ) -> Tensor:
        _remember(ctx, weight, bias, layer, message)
        whole = message.gathered(x, layer.tp) if ctx.sequence else x
        y, ctx.kept = layer.products.forward(whole, weight, bias)
        hidden = () if layer.adapters is None else layer.adapters.add_to(y, whole, adapters)
        ctx.save_for_backward(x, weight, bias, *adapters, *hidden)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *more = ctx.saved_tensors
        axis: Axis = ctx.layer.tp
        products: Products = ctx.layer.products
        products.begin_backward(dy, weight, ctx.kept)
        whole = x
        gathering: Handle = Done()
        if ctx.sequence and (ctx.needs_input_grad[1] or more):
            whole = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
            gathering = all_gather_into(whole, x, axis, async_op=True)
        dx = None
        reducing: Handle = Done()
        partial = products.input_gradient(dy, weight, ctx.kept) if ctx.needs_input_grad[0] else None
        adapted = ctx.layer.adapters.backward(dy, more, partial) if more else None
        if partial is not None:
            gathering.wait()
            dx, reducing = start_sum(partial, axis, sequence=ctx.sequence)
        gathering.wait()
        gradients = weight_gradients(ctx, whole, dy, weight, bias)
        of_adapters = () if adapted is None else adapted(whole)
        ctx.message.hold(reducing)
        return dx, *gradients, None, None, *of_adapters


class _RowLinear(Node):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        layer: RowParallelLinear,
        message: Message,
        *adapters: Tensor,
    ) -> Tensor:
        _remember(ctx, weight, bias, layer, message)
        ctx.activation, before = activation, x
        x = x if activation is None else activation(x)
        y, ctx.kept = layer.products.forward(x, weight, bias if layer.tp.rank == 0 else None)
        hidden = () if layer.adapters is None else layer.adapters.add_to(y, x, adapters)
        ctx.save_for_backward(before, weight, bias, *adapters, *hidden)
        y, summing = start_sum(y, layer.tp, sequence=ctx.sequence)
        message.hold(summing)
        # A product may come as a view, and autograd refuses a view whose base changes behind it: here when the sum
        # arrives, with whatever message of the axis is waited for first.
        return y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *more = ctx.saved_tensors
        before = x
        if ctx.activation is not None:
            x = ctx.activation(before)
        dbias = None
        if bias is not None and ctx.needs_input_grad[2]:  # before the gather: each rank sums its own tokens
            dbias = bias_gradient(ctx, dy, bias)
        if ctx.sequence:
            dy = ctx.message.gathered(dy, ctx.layer.tp)
        products: Products = ctx.layer.products
        products.begin_backward(dy, weight, ctx.kept)
        dx = products.input_gradient(dy, weight, ctx.kept) if ctx.needs_input_grad[0] else None
        dweight, _ = weight_gradients(ctx, x, dy, weight, None)
        of_adapters = ctx.layer.adapters.backward(dy, more, dx)(x) if more else ()
        if dx is not None and ctx.activation is not None:
            dx = ctx.layer.activation_gradient(before, dx)
        return dx, dweight, dbias, None, None, None, *of_adapters


def _remember(ctx: Any, weight: Tensor, bias: Tensor | None, layer: Linear, message: Message) -> None:
    """Keeps what both backwards need besides tensors."""
    ctx.layer, ctx.message, ctx.sequence = layer, message, layer.sequence_parallel and layer.tp.size > 1
    ctx.sinks = sink_of(weight), None if bias is None else sink_of(bias)


def weight_gradients(
    ctx: Any, x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """dW = dy^T x and db = sum of dy: added to the sinks (then None is returned), or returned for autograd."""
    dweight = dbias = None
    products, kept = ctx.layer.products, ctx.kept
    if ctx.needs_input_grad[1]:
        # detached: if it is postponed, it must not keep the graph of the micro-batch alive
        rows, columns = x.detach().reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dweight = ctx.layer.weight_grads.give(
            ctx.sinks[0],
            lambda sink: products.add_weight_gradient(sink, columns, rows, kept),
            lambda: products.weight_gradient(columns, rows, weight, kept),
        )
    if bias is not None and ctx.needs_input_grad[2]:
        dbias = bias_gradient(ctx, dy, bias)
    return dweight, dbias


def bias_gradient(ctx: Any, dy: Tensor, bias: Tensor) -> Tensor | None:
    """The sum of dy over all tokens, into the sink or returned."""
    rows, shape = dy.flatten(0, -2), bias.shape
    layer: Linear = ctx.layer
    return layer.weight_grads.give(
        ctx.sinks[1], lambda sink: sink.add(sum_widened(rows).view(shape)), lambda: rows.sum(0).view(shape)
    )


def make_layer(kind: str, usual: Callable[..., Layer], *given: Any, **how: Any) -> Layer:
    """`usual(...)`, or the layer of this kind that the grid of the context has. The context is `ctx`, or given last."""
    grid = (how["ctx"] if "ctx" in how else given[-1]).grid
    layer: Layer = (usual if grid is None else grid[kind])(*given, **how)
    return layer


column_linear = partial(make_layer, "column", ColumnParallelLinear)
row_linear = partial(make_layer, "row", RowParallelLinear)
