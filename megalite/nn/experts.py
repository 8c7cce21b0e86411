"""The sparse MLP of a block: a router, E experts of which each token takes k, and perhaps one MLP that all take.

    y = sum over the token's experts e of w_e * expert_e(x)   (+ shared(x))

The experts' matrices are stacked, `[E, f, h]` (gated: `[E, 2, f, h]`), cut over `etp` as an MLP is over `tp`, and dealt
out over `ep`. Where ranks share an expert each needs all tokens of the others: they are gathered under sequence
parallelism, and are the same anyway without it; the sum over the ranks is that of an MLP.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm import all_gather, copy_to_axis, gather_sequence, reduce_from_axis, scatter_sum_sequence
from megalite.config import ModelConfig
from megalite.inventory import NO_AXES, ParameterPlacement
from megalite.microbatch import Microbatch
from megalite.nn.activation import ACTIVATIONS, GRADIENTS
from megalite.nn.mlp import MLP, output_std
from megalite.nn.router import Router, Routing
from megalite.parallel.expert import Dispatched, GroupedProduct, Plan, combine, plan_dispatch
from megalite.parallel.tensor import LayerContext, new_parameter, product_dtype


class Activation:
    """An activation with its gradient, for rows that are computed group after group."""

    def __init__(self, name: str) -> None:
        self.of, self._gradient, self._swiglu = ACTIVATIONS[name], GRADIENTS[name], name == "swiglu"

    def backward(self, x: Tensor, dy: Tensor, dx: Tensor | None) -> Tensor:
        """Returns `of(x)`; writes the gradient of x into dx, if it is given. dy: of the result; is overwritten."""
        if dx is None or not self._swiglu:
            if dx is not None:
                dx.copy_(self._gradient(x, dy))
            return self.of(x)
        (gate, value), (dgate, dvalue) = x.chunk(2, -1), dx.chunk(2, -1)  # the same bits, with one silu for both
        silu = F.silu(gate)
        torch.mul(dy, silu, out=dvalue)
        torch.ops.aten.silu_backward.grad_input(dy.mul_(value), gate, grad_input=dgate)
        return silu.mul_(value)


class StackedLinear(nn.Module):
    """One linear layer of each expert that is here: `[E, ..., out, in]`, and biases `[E, ..., out]`.

    cut: the dimension of the weight that `etp` cuts, its outputs or its inputs; a bias of outputs that are not cut is
    added by the first rank.
    """

    def __init__(self, shape: tuple[int, ...], *, cut: int, bias: bool, init_std: float, ctx: LayerContext) -> None:
        super().__init__()
        axes = ctx.experts
        parts = {0: axes.ep, cut: axes.etp}
        local = tuple(n // parts[d].size if d in parts else n for d, n in enumerate(shape))
        offset = tuple(parts[d].rank * local[d] if d in parts else 0 for d in range(len(shape)))
        sharded, rows = axes.ep.names | axes.etp.names, cut < len(shape) - 1
        place = ParameterPlacement(shape, offset, sharded, init_std=init_std, family="expert")
        self.weight = new_parameter(local, place, ctx)
        self.bias: nn.Parameter | None = None
        if bias:
            sharded = axes.ep.names | (axes.etp.names if rows else NO_AXES)
            place = ParameterPlacement(shape[:-1], offset[:-1], sharded, decay=False, family="expert")
            self.bias = new_parameter(local[:-1], place, ctx)
        self.product = GroupedProduct(
            ctx.weight_grads, product_dtype(ctx.dtype, torch.device(ctx.device).type), rows or axes.etp.is_first
        )


class StackedExperts(nn.Module):
    """Every expert an MLP of its own: rows of one expert after the other, `[n, h]` -> `[n, h]`."""

    def __init__(self, config: ModelConfig, ctx: LayerContext) -> None:
        super().__init__()
        number, h, f = config.experts.num_experts or 1, config.hidden_size, config.expert_ffn_size
        bias = config.add_bias_linear
        up = (2, f) if config.gated else (f,)
        std = config.init_method_std
        self.fc1 = StackedLinear((number, *up, h), cut=len(up), bias=bias, init_std=std, ctx=ctx)
        self.fc2 = StackedLinear((number, h, f), cut=2, bias=bias, init_std=output_std(config), ctx=ctx)
        self.activation = Activation(config.activation)

    def forward(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        up, down = self.fc1, self.fc2
        hidden = up.product(x, up.weight, up.bias, counts)
        return down.product(hidden, down.weight, down.bias, counts, self.activation)


class MoE(nn.Module):
    """The sparse MLP of layer `index`, `[s, b, h]` -> `[s, b, h]` (`[s/t, b, h]` under sequence parallelism)."""

    def __init__(self, config: ModelConfig, index: int, ctx: LayerContext) -> None:
        super().__init__()
        self.router = Router(config, index, ctx)
        self.experts = StackedExperts(config, ctx)
        width = config.experts.moe_shared_expert_intermediate_size
        self.shared_experts = None if width is None else MLP(config, ctx, width)
        # The ranks that share an expert are those of the tensor axis, whose messages are the faster ones.
        self.shares = ctx.tp if ctx.experts.etp.size > 1 else ctx.experts.etp
        self.split, self.ep = ctx.sequence_split, ctx.experts.ep

    def segments(self, microbatch: Microbatch) -> list[Any]:
        """Cut at its messages: routing and the way to the experts, the shared expert meanwhile | the products of the
        others | the way back and the sum."""
        return [partial(self.send, microbatch), self.compute, self.receive]

    def send(self, microbatch: Microbatch, x: Tensor) -> tuple[Tensor, Tensor, Plan, torch.Size, Tensor | None]:
        """(Rows of the experts that are here, the weights of each token's experts, the way, x's shape, the shared
        expert's result: it is computed while tokens travel, as its backward is while their gradients do)."""
        tokens, routing = self._whole(x.flatten(0, 1), self.router(x, microbatch))
        experts, weights, kept = routing
        plan = plan_dispatch(experts, kept, self.router.num_experts, self.ep)
        travelling, shared = Dispatched(tokens, plan), None
        if self.shared_experts is not None:
            shared = self.shared_experts.fc2(self.shared_experts.fc1(x))
        return travelling.wait(), weights, plan, x.shape, shared

    def compute(self, rows: Tensor, *rest: Any) -> tuple[Any, ...]:
        """(What all experts made of their rows, the rest of what `send` returned)."""
        return self.experts(rows, rest[1].counts), *rest

    def receive(self, rows: Tensor, weights: Tensor, plan: Plan, shape: torch.Size, shared: Tensor | None) -> Tensor:
        """`[s, b, h]`: the sum of what a token's experts, and the shared one, made of it."""
        y = combine(rows, weights, plan)
        y = scatter_sum_sequence(y, self.shares) if self.split else reduce_from_axis(y, self.shares)
        return y.view(shape) if shared is None else y.view(shape) + shared

    def _whole(self, tokens: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """What this rank's part of an expert must see: the tokens of all ranks that share it."""
        experts, weights, kept = (None if part is None else part.flatten(0, 1) for part in routing)
        assert experts is not None and weights is not None
        axis = self.shares
        if axis.size > 1 and self.split:
            experts = all_gather(experts, axis)
            kept = None if kept is None else all_gather(kept.to(torch.uint8), axis).bool()
        enter = gather_sequence if self.split else copy_to_axis
        return enter(tokens, axis), Routing(experts, enter(weights.contiguous(), axis), kept)
