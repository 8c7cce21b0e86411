"""The sparse MLP of a block: a router, E experts of which each token takes k, and perhaps one MLP that all take.

    y = sum over the token's experts e of w_e * expert_e(x)   (+ shared(x))

The experts' matrices are stacked, `[E, f, h]` (gated: `[E, 2, f, h]`), cut over `etp` as an MLP is over `tp`, and dealt
out over `ep`. Where ranks share an expert each needs all tokens of the others: they are gathered under sequence
parallelism, and are the same anyway without it; the sum over the ranks is that of an MLP.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm import all_gather
from megalite.config import ModelConfig
from megalite.inventory import Parameter, experts, whole
from megalite.microbatch import Microbatch
from megalite.nn.activation import ACTIVATIONS, activation_of
from megalite.nn.mlp import MLP
from megalite.nn.router import Router
from megalite.nn.segment import MakeMessage, Segment
from megalite.parallel.expert import Carried, Dispatched, GroupedProduct, plan_dispatch
from megalite.parallel.tensor import (
    LayerContext,
    Message,
    enter_parallel,
    leave_parallel,
    parameter_of,
    product_dtype,
    weight_and_bias,
)


class Activation:
    """An activation with its gradient, for rows that are computed group after group."""

    def __init__(self, config: ModelConfig) -> None:
        self._plain, self._gradient = activation_of(config)
        self._swiglu = self._plain is ACTIVATIONS["swiglu"][0]
        self.of = self._plain
        self._fused: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def backward(self, x: Tensor, dy: Tensor, dx: Tensor | None) -> Tensor:
        """Returns `of(x)`; writes the gradient of x into dx, if it is given. dy: of the result; is overwritten."""
        if dx is not None and self._fused is not None:
            return self._fused(x, dy, dx)
        if dx is None or not self._swiglu:
            if dx is not None:
                dx.copy_(self._gradient(x, dy))
            return self.of(x)
        (gate, value), (dgate, dvalue) = x.chunk(2, -1), dx.chunk(2, -1)  # the same bits, with one silu for both
        silu = F.silu(gate)
        torch.mul(dy, silu, out=dvalue)
        torch.ops.aten.silu_backward.grad_input(dy.mul_(value), gate, grad_input=dgate)
        return silu.mul_(value)

    def compile(self, backend: str) -> None:
        """`torch.compile` for both directions: where another number of rows comes, once more, and then for any."""
        self._fused = torch.compile(self._by_formulas, backend=backend)
        self.of = torch.compile(self.of, backend=backend)

    def _by_formulas(self, x: Tensor, dy: Tensor, dx: Tensor) -> Tensor:
        dx.copy_(self._gradient(x, dy))
        return self._plain(x)


class StackedLinear(nn.Module):
    """One linear layer of each of this rank's experts: `[E, ..., out, in]`, and biases `[E, ..., out]`.

    parameters: either of `inventory.experts`. A bias of outputs that `etp` does not cut is added by the first rank.
    """

    def __init__(self, parameters: Sequence[Parameter], ctx: LayerContext) -> None:
        super().__init__()
        self.weight, self.bias = weight_and_bias(parameters, ctx)
        rows = parameters[0].cut != len(parameters[0].shape) - 1
        dtype = product_dtype(ctx.dtype, torch.device(ctx.device).type)
        self.own_product = GroupedProduct(ctx.weight_grads, dtype, rows or ctx.experts.etp.is_first)
        self.product: Callable[..., Tensor] = self.own_product


class StackedExperts(nn.Module):
    """Every expert an MLP of its own: rows of one expert after the other, `[n, h]` -> `[n, h]`."""

    def __init__(self, config: ModelConfig, ctx: LayerContext) -> None:
        super().__init__()
        up, down = experts(config)
        self.fc1, self.fc2 = StackedLinear(up, ctx), StackedLinear(down, ctx)
        self.activation = Activation(config)


class SharedGate(nn.Module):
    """Opens the shared expert for each token: sigmoid(w x), `[s, b, h]` -> `[s, b, 1]`."""

    def __init__(self, config: ModelConfig, ctx: LayerContext) -> None:
        super().__init__()
        self.weight = parameter_of(whole("shared_gate", 1, config.hidden_size, config), ctx)

    def forward(self, x: Tensor) -> Tensor:
        opened: Tensor = torch.sigmoid(F.linear(x, self.weight))
        return opened


class MoE(nn.Module):
    """The sparse MLP of layer `index`, `[s, b, h]` -> `[s, b, h]` (`[s/t, b, h]` under sequence parallelism)."""

    def __init__(self, config: ModelConfig, index: int, ctx: LayerContext) -> None:
        super().__init__()
        self.router = Router(config, index, ctx)
        self.experts = StackedExperts(config, ctx)
        width = config.experts.moe_shared_expert_intermediate_size
        self.shared_experts = None if width is None else MLP(config, ctx, width)
        self.shared_gate = SharedGate(config, ctx) if config.experts.moe_shared_expert_gate else None
        # The ranks that share an expert are those of the tensor axis, whose messages are the faster ones.
        self.shares = ctx.tp if ctx.experts.etp.size > 1 else ctx.experts.etp
        self.split, self.axes = ctx.sequence_split, ctx.experts

    def compile_parts(self, backend: str) -> None:
        """`torch.compile` for what router and experts compute between their products, their biases, and what joins the
        shared expert: messages, sorting and gathering rows by experts stay outside."""
        self.router.compile_parts(backend)
        self.experts.activation.compile(backend)
        for linear in (self.experts.fc1, self.experts.fc2):
            if linear.bias is not None:
                linear.own_product.add_biases = torch.compile(linear.own_product.add_biases, backend=backend)
        setattr(self, "join", torch.compile(self.join, backend=backend))  # noqa: B010

    def join(self, y: Tensor, beside: Tensor, gate: Tensor | None) -> Tensor:
        """The experts' sum with what the shared one made, behind its gate."""
        return y + (beside if gate is None else gate * beside)

    def segments(self, microbatch: Microbatch, message: MakeMessage = Message) -> list[Segment]:
        """Cut behind its messages, and between the experts' two products."""
        run = _SparseRun(self, microbatch, message)
        # In halves (`nn.halves`) the rows of one travel while the other multiplies only if it rests between products.
        rests = self.axes.ep.size > 1 and self.shared_experts is None
        products = [Segment(run.up), *([Segment(lambda hidden: hidden)] if rests else []), Segment(run.down)]
        return [
            Segment(run.route, (self.router, *(() if self.shared_gate is None else (self.shared_gate,)))),
            Segment(run.dispatch),
            *products,
            Segment(run.combine),
            Segment(run.receive),
        ]


class _SparseRun:
    """One run of a sparse MLP; its methods are the segments, in this order."""

    def __init__(self, layer: MoE, microbatch: Microbatch, message: MakeMessage) -> None:
        self.layer, self.microbatch = layer, microbatch
        self.before, self.behind = message(), message()
        shared = layer.shared_experts
        self.shared = [] if shared is None else shared.segments(microbatch, message)

    def route(self, x: Tensor) -> Tensor:
        """Chooses experts, and starts to gather the tokens of all ranks that share them."""
        self.shape = x.shape
        tokens = x.flatten(0, 1)  # before the router: the order in which gradients of x are added up
        self.routing = self.layer.router(x, self.microbatch)
        if self.shared:
            self.shared_x = self.shared[0].run(x)
        self.gate = None if self.layer.shared_gate is None else self.layer.shared_gate(x)
        return self.before.send(tokens, self.layer.shares, sequence=self.layer.split)

    def dispatch(self, x: Tensor) -> Tensor:
        """Sends tokens to their experts. The shared expert is computed while they travel, as its backward is while
        their gradients do."""
        layer, axis, split = self.layer, self.layer.shares, self.layer.split
        tokens = enter_parallel(x, self.before, axis, sequence=split)
        experts, kept = self.routing.experts.flatten(0, 1), self.routing.kept
        kept = None if kept is None else kept.flatten(0, 1)
        counts = self.routing.counts if kept is None and axis.size == 1 else None
        if axis.size > 1 and split:
            experts = all_gather(experts, axis)
            kept = None if kept is None else all_gather(kept.to(torch.uint8), axis).bool()
        weights = self.routing.weights.flatten(0, 1).contiguous()
        self.weights = enter_parallel(weights, Message(), axis, sequence=split)
        number, axes = layer.router.num_experts, layer.axes
        self.dispatched: Dispatched | Carried
        if axes.library is None:
            self.dispatched = Dispatched(tokens, plan_dispatch(experts, kept, number, axes.ep, counts))
        else:
            self.dispatched = Carried(tokens, experts, kept, self.weights, number, axes)
        if self.shared:
            _, fc1, fc2, _ = self.shared
            self.shared_y = fc2.run(fc1.run(self.shared_x))
        return self.dispatched.rows

    def up(self, _: Tensor) -> Tensor:
        """The first product of this rank's experts."""
        fc1, rows = self.layer.experts.fc1, self.dispatched.wait()
        return fc1.product(rows, fc1.weight, fc1.bias, self.dispatched.counts)

    def down(self, hidden: Tensor) -> Tensor:
        """The activation and the second product; its rows start back."""
        experts, counts = self.layer.experts, self.dispatched.counts
        results = experts.fc2.product(hidden, experts.fc2.weight, experts.fc2.bias, counts, experts.activation)
        counts.forget_experts()
        return self.dispatched.back(results).rows

    def combine(self, _: Tensor) -> Tensor:
        """Adds up the results of each token's experts; starts the sum over the ranks that share them."""
        y = self.dispatched.combine(self.weights)
        return leave_parallel(y, self.behind, self.layer.shares, sequence=self.layer.split)

    def receive(self, y: Tensor) -> Tensor:
        """`[s, b, h]`: what a token's experts, and the shared one, made of it."""
        y = self.behind.receive(y, self.layer.shares, sequence=self.layer.split).view(self.shape)
        if not self.shared:
            return y
        return self.layer.join(y, self.shared[-1].run(self.shared_y), self.gate)
