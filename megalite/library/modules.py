"""Somebody's modules as a stage: the first reads the micro-batch, the last computes the loss.

A plain `nn.Linear` inside them splits its backward like our own layers do: schedules that postpone weight gradients
(Zero Bubble, arXiv 2401.10241) gain with it what they gain with ours. Other modules compute both gradients at once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from megalite.errors import ConfigError
from megalite.gradient import WeightGradQueue, sink_of, sum_widened
from megalite.library.cutting import Boundary, Ranges, Tensors, call
from megalite.library.traced_layer import Product, product
from megalite.microbatch import Microbatch
from megalite.nn import Uncompiled
from megalite.parallel.pipeline import repeated
from megalite.parallel.tensor import Products, product_dtype, weight_gradients

LossFunction = Callable[[Any, Any], Tensor]
"""(What the last layer returns, target) -> 0-dim, the mean over the micro-batch."""


def sent(x: Tensor, device: torch.device) -> Tensor:
    """x on a device. From host memory nobody waits for it: what x is now is copied, and x may change."""
    if device.type == "cpu" or x.device.type != "cpu" or x.layout != torch.strided:
        return x if x.is_meta else x.to(device)
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x).to(device, non_blocking=True)


@dataclass(frozen=True)
class Sample:
    """A micro-batch of a user: what the first layer takes, and what the loss is computed with.

    number: of its first sample, which keys what layers draw; None where it does not.
    microbatch: what attention asks about documents and places; None where it does not ask.
    """

    inputs: Tensors
    target: Any
    number: int | None = None
    microbatch: Microbatch | None = None

    def arranged(self, x: Tensor) -> Tensor:
        return x


class StageModule(nn.Module):
    """Consecutive layers.

    loss: on the last stage. arrives: from the stage before, if there is one. leaves: what the next one expects.
    first: number of the first layer. copies: places of layers that write into their input, and get a copy.
    ranges: of its layers; those that recompute keep their input alone.
    trained: (name, parameter) of what learns, each once.
    """

    names: tuple[str, ...] = ()
    trained: Sequence[tuple[str, nn.Parameter]] = ()

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss: LossFunction | None,
        arrives: Boundary,
        leaves: Boundary,
        first: int,
        *,
        copies: frozenset[int],
        ranges: Ranges,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.loss, self.arrives, self.leaves, self.first = loss, arrives, leaves, first
        self.copies, self.ranges = copies, ranges

    def forward(self, x: Tensor | None, sample: Sample) -> Tensor:
        """`x` is None on the first stage."""
        y = sample.inputs if x is None else self.arrives.unpack(x)
        for begin, end, again in self.ranges:
            if again and torch.is_grad_enabled():
                contexts = partial(self._contexts, begin, end)
                y = checkpoint(self._run, begin, end, y, sample, use_reentrant=False, preserve_rng_state=False,
                               context_fn=contexts)  # fmt: skip
            else:
                y = self._run(begin, end, y, sample)
        if self.loss is None:
            return self._message(y)
        value = self.loss(y[0] if len(y) == 1 else y, sample.target)
        found = "" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        if not found and value.dim():
            found = f"a tensor of shape {tuple(value.shape)}"
        elif (
            not found and torch.is_grad_enabled() and not value.requires_grad and any(part.requires_grad for part in y)
        ):
            found = "a tensor that has no gradient (detached)"
        if found:
            raise ConfigError(
                f"loss: returns {found}; it must return the mean, a 0-dim tensor computed from the output"
            )
        return value

    def _run(self, begin: int, end: int, y: Tensors, sample: Sample) -> Tensors:
        if begin in self.copies:
            y = tuple(value.clone() for value in y)
        for number in range(begin, end):
            self.before(self.first + number, sample)
            y = call(self.layers[number], y, sample.inputs, sample.microbatch)
        return y

    def _contexts(self, begin: int, end: int) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Of a forward, and of the same forward again."""
        buffers = [buffer for layer in self.layers[begin:end] for buffer in layer.buffers()]
        return nullcontext(), repeated(buffers, self.leaves.specs[0].device)

    def repeat(self) -> AbstractContextManager[None]:
        """Of a forward that a schedule runs again."""
        return self._contexts(0, len(self.layers))[1]

    def ordered(self) -> list[nn.Module]:
        """The layers in order."""
        return list(self.layers)

    def logical_parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """(Name, parameter) of what learns, each once."""
        return self.trained

    def before(self, layer: int, sample: Sample) -> None:
        """Called before each layer is, with its number."""

    def _message(self, y: Tensors) -> Tensor:
        if not self.leaves.fits(y):
            last = self.first + len(self.layers) - 1
            returned = " and ".join(f"{tuple(value.shape)} of {value.dtype}" for value in y)
            raise ConfigError(
                f"layers[{last}]: returned {returned}, but for the example {self.leaves}, which the next stage "
                "expects; under autocast, cast its result"
            )
        message = self.leaves.pack(y)
        # a first stage without trainable parameters has no graph to come back to
        return message if message.requires_grad or not torch.is_grad_enabled() else message.detach().requires_grad_()


@dataclass(frozen=True)
class _WholeLinear:
    """What the backward of our linear layers asks of a layer; this one is cut by no axis."""

    weight_grads: WeightGradQueue
    products: Products


class _SplitLinear(Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch's own has no type

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _WholeLinear) -> Tensor:
        ctx.layer = layer
        ctx.sinks = sink_of(weight), None if bias is None else sink_of(bias)
        ctx.save_for_backward(x, weight, bias)
        y, ctx.kept = layer.products.forward(x, weight, bias)
        if y._base is None:
            return y
        # of a function of its own, a view must not be written into; an activation in place may come next
        return torch.ops.aten._unsafe_view(y._base, y.shape) if y._base.numel() == y.numel() else y.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        dx = ctx.layer.products.input_gradient(dy, weight, ctx.kept) if ctx.needs_input_grad[0] else None
        return dx, *weight_gradients(ctx, x, dy, weight, bias), None


class _SplitTurned(Function):
    """x weight + bias of `[n, in]` and `[in, out]`."""

    apply: ClassVar[Callable[..., Tensor]]  # torch's own has no type

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGradQueue) -> Tensor:
        ctx.queue, ctx.sinks = queue, (sink_of(weight), None if bias is None else sink_of(bias))
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, (weight_sink, bias_sink) = x.detach().t(), ctx.sinks
        dx = dy @ weight.t() if ctx.needs_input_grad[0] else None
        dweight = dbias = None
        if ctx.needs_input_grad[1]:
            dweight = ctx.queue.give(weight_sink, lambda sink: sink.addmm(rows, dy), lambda: rows @ dy)
        if ctx.needs_input_grad[2]:
            dbias = ctx.queue.give(bias_sink, lambda sink: sink.add(sum_widened(dy)), lambda: dy.sum(0))
        return dx, dweight, dbias, None


@Uncompiled
def _split_product(
    layer: _WholeLinear, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, turned: bool = False
) -> Tensor:
    plain = torch.is_autocast_enabled(x.device.type) or x.dtype != weight.dtype  # torch's own rules hold
    if plain or (turned and layer.products.dtype != x.dtype):
        return product(x, weight, bias, turned=turned)
    if turned:
        return _SplitTurned.apply(x, weight, bias, layer.weight_grads)
    return _SplitLinear.apply(x, weight, bias, layer)


def _of_linear(linear: nn.Linear, product: Callable[..., Tensor], x: Tensor) -> Tensor:
    return product(x, linear.weight, linear.bias)


def count_calls(layers: Iterable[nn.Module], calls: Counter[int]) -> list[RemovableHandle]:
    """Counts by id how often each linear layer is called, until the handles are removed."""
    linears = {id(m): m for layer in layers for m in layer.modules() if type(m) is nn.Linear}
    return [m.register_forward_pre_hook(lambda m, _: calls.update([id(m)])) for m in linears.values()]


def split_backwards(stage: StageModule, queue: WeightGradQueue, device: torch.device, calls: Counter[int]) -> None:
    """The stage's linear layers put their weight gradients into the queue; not those that share their weight, or
    that a micro-batch calls more than once."""
    Uncompiled.settle()  # the user's module may be compiled at any time
    owners = Counter(id(p) for module in stage.modules() for p in module.parameters(recurse=False))

    def split(dtype: torch.dtype) -> Callable[..., Tensor]:
        return partial(_split_product, _WholeLinear(queue, Products(product_dtype(dtype, device.type))))

    for module in stage.modules():
        if isinstance(module, Product):
            dtype = next(p.dtype for p in stage.parameters() if p.is_floating_point())
            module.forward = split(dtype)  # type: ignore[method-assign]  # of this one module, not of its class
        elif type(module) is nn.Linear and module.weight.requires_grad:
            if owners[id(module.weight)] == calls[id(module)] == 1:
                module.forward = partial(_of_linear, module, split(module.weight.dtype))  # type: ignore[method-assign]  # too
