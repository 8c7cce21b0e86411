"""Routers: they choose the experts of each token and their weights, and give the losses that balance their load.

    logits = x W^T (+ bias), [s, b, E], in fp32 or wider
    softmax             weights: softmax over the k largest logits; `pre_softmax`: the k largest of the softmax over all
    sigmoid             the k largest; weights: sigmoids, divided by their sum (DeepSeek-V3, arXiv 2412.19437)
    groups              first the groups with the best experts are chosen, then experts among theirs
    expert bias         added to the scores that choose, not to the weights (arXiv 2408.15664); moved at every update
                        (`engine.expert_bias`), without a gradient

Of equal scores the expert with the lower number comes first: the same on every rank.

Auxiliary losses, each added to the loss of the batch with weight 1, layer by layer:

    a E/k sum_e f_e P_e         f_e: tokens of expert e / tokens; P_e: mean of its probability (arXiv 2101.03961); over
                                the tokens of a sequence or of a micro-batch, then the mean over the batch; balanced: a
    c mean(logsumexp(logits)^2) over all tokens of the batch (arXiv 2202.08906)

f_e counts all tokens of a sequence, on whatever ranks they are, and has no gradient, so each rank's gradient is that of
its own tokens: nothing is scaled by the size of any axis.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm import all_gather, all_reduce_, own_slice
from megalite.config import Experts, ModelConfig
from megalite.gradient import Node
from megalite.inventory import router
from megalite.microbatch import Microbatch
from megalite.parallel.tensor import LayerContext, weight_and_bias


class Routing(NamedTuple):
    """Choices of this rank's tokens, `[s, b, k]` each.

    experts: int64. weights: fp32 or wider. kept: bool; None: all.
    counts: how often each expert was chosen, int64 `[E]`.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor | None
    counts: Tensor


class Router(nn.Module):
    """The router of layer `index`: `[s, b, h]` (this rank's part of the sequence) -> `Routing`."""

    def __init__(self, config: ModelConfig, index: int, ctx: LayerContext) -> None:
        super().__init__()
        self.given, self.index, self.loads = config.experts, index, ctx.loads
        self.num_experts = config.experts.num_experts or 1
        self.weight, self.bias = weight_and_bias(router(config), ctx)
        self.expert_bias: Tensor | None
        biased = config.experts.moe_router_enable_expert_bias
        zeros = torch.zeros(self.num_experts, dtype=ctx.wide_dtype, device=ctx.device) if biased else None
        self.register_buffer("expert_bias", zeros)
        # ranks that hold other tokens of the same sequences, innermost first
        parts = (*((ctx.tp,) if ctx.sequence_split else ()), ctx.cp.heads, ctx.cp.ring)
        self.parts = [axis for axis in parts if axis.size > 1]
        self.sharers = math.prod(axis.size for axis in parts)
        self.counts = ctx.sequence_split or ctx.tp.is_first  # else another rank has the same tokens

    def forward(self, x: Tensor, microbatch: Microbatch) -> Routing:
        given, k = self.given, self.given.moe_router_topk
        logits = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        probabilities, experts, weights, tokens = self.decide(logits)
        kept = None
        factor = given.moe_expert_capacity_factor
        if factor is not None and self.training:
            length = x.shape[0] * self.sharers
            kept = self.first_in_line(experts, math.ceil(factor * k * length / self.num_experts), microbatch)
        counts, load, loss = self.judge(logits, probabilities, tokens, kept)
        if load is not None:
            self.loads.note(self.index, load)
        if loss is not None and torch.is_grad_enabled() and microbatch.share is not None:
            weights = Attach.apply(weights, loss, microbatch.share)
        return Routing(experts, weights, kept, counts)

    def decide(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(Probabilities `[s, b, E]`; experts and their weights `[s, b, k]`; how many tokens of each sequence take each
        expert, int64 `[b, E]`)."""
        probabilities, ranking = scores(logits, self.given)
        with torch.no_grad():
            experts = choose(ranking if self.expert_bias is None else ranking + self.expert_bias, self.given)
        weights = weights_of(logits, probabilities, experts, self.given)
        return probabilities, experts, weights, tokens_of_experts(experts, self.num_experts)

    def compile_parts(self, backend: str) -> None:
        """`torch.compile` for what follows the product; sums over ranks stay outside."""
        for name in ("decide", *([] if self.parts else ["judge"])):
            setattr(self, name, torch.compile(getattr(self, name), backend=backend))

    def judge(
        self, logits: Tensor, probabilities: Tensor, tokens: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(How often each expert was chosen; what is noted of it, None where another rank does; this rank's part of the
        losses that balance times their coefficients, None: there are none). tokens: of each sequence, `[b, E]`."""
        counts, nothing, given = tokens.sum(0), logits.new_zeros(()), self.given
        balance, z = self.losses(logits, probabilities, tokens, nothing)
        load = None
        if self.counts:
            dropped = nothing if kept is None else (~kept).sum()
            numbers = [counts, *(number.detach().view(1) for number in (balance, z, dropped))]
            load = torch.cat([part.to(logits.dtype) for part in numbers])
        losses = ((given.moe_aux_loss_coeff, balance), (given.moe_z_loss_coeff, z))
        terms = [coefficient * loss for coefficient, loss in losses if coefficient and loss is not nothing]
        return counts, load, sum(terms[1:], terms[0]) if terms else None

    def losses(self, logits: Tensor, probabilities: Tensor, counts: Tensor, nothing: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of the load-balancing loss and of the z-loss; `nothing` where there is none. counts: tokens
        of each sequence that take each expert, `[b, E]`."""
        given = self.given
        length, samples = logits.shape[0] * self.sharers, logits.shape[1]
        z = nothing
        if given.moe_z_loss_coeff > 0:
            z = torch.logsumexp(logits, -1).square().sum() / (length * samples)
        if not given.balances:
            return nothing, z
        mass, tokens = probabilities.sum(0), length
        if given.moe_router_load_balancing_type == "aux_loss":
            counts, mass, tokens = counts.sum(0, keepdim=True), mass.sum(0, keepdim=True), length * samples
        counts = counts.to(logits.dtype)
        for axis in self.parts:
            all_reduce_(counts, axis)
        even = self.num_experts / given.moe_router_topk
        loads = (counts / tokens * (mass / tokens)).sum(-1)
        return even * (loads.mean() if len(loads) > 1 else loads.view(())), z

    @torch.no_grad()
    def first_in_line(self, experts: Tensor, capacity: int, microbatch: Microbatch) -> Tensor:
        """Whether a choice `[s, b, k]` is among the first `capacity` of its sequence for its expert, token after token
        in the order of the sequence, and of a token in the order of its choices."""
        everyone = experts
        for axis in self.parts:
            everyone = all_gather(everyone.contiguous(), axis)
        order = microbatch.order
        if order is not None:
            everyone = torch.empty_like(everyone).index_copy_(0, order, everyone)
        line = everyone.transpose(0, 1).flatten(1)  # [b, s * k]
        ordered, places = line.sort(dim=1, stable=True)
        counts = tokens_of_experts(everyone, self.num_experts)
        begins = (counts.cumsum(1) - counts).gather(1, ordered)
        position = torch.empty_like(line).scatter_(1, places, torch.arange(line.shape[1], device=line.device) - begins)
        kept = (position < capacity).view(everyone.shape[1], -1, everyone.shape[2]).transpose(0, 1)
        if order is not None:
            kept = kept[order]
        for axis in reversed(self.parts):
            kept = own_slice(kept, axis)
        return kept


class NamedBias(NamedTuple):
    """The expert bias of layer `layer`, `[E]`, and its logical name."""

    name: str
    layer: int
    values: Tensor


def expert_biases(module: nn.Module) -> list[NamedBias]:
    """Collects the biases of a model's routers, in the order of the layers."""
    routers = ((path, router) for path, router in module.named_modules() if isinstance(router, Router))
    return [
        NamedBias(f"{path}.expert_bias", router.index, router.expert_bias)
        for path, router in routers
        if router.expert_bias is not None
    ]


def scores(logits: Tensor, given: Experts) -> tuple[Tensor, Tensor]:
    """(Probabilities of the experts, which sum up to 1; what decides which of them are taken), `[s, b, E]` each."""
    if given.moe_router_score_function == "sigmoid":
        open_gates = torch.sigmoid(logits)
        return open_gates / (open_gates.sum(-1, keepdim=True) + 1e-20), open_gates
    probabilities = torch.softmax(logits, -1)
    return probabilities, probabilities if given.moe_router_pre_softmax else logits


def choose(ranking: Tensor, given: Experts) -> Tensor:
    """The experts that are taken, best first, int64 `[s, b, k]`."""
    k, groups, best_groups = given.moe_router_topk, given.moe_router_num_groups, given.moe_router_group_topk
    if groups is not None and best_groups is not None:
        grouped = ranking.unflatten(-1, (groups, -1))
        best = grouped.topk(min(max(1, k // best_groups), grouped.shape[-1]), -1).values.sum(-1)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, largest(best, best_groups), True)
        ranking = grouped.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(-2)
    return largest(ranking, k)


def largest(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest of the last dimension, largest first, of equal ones the first: `[..., k]`."""
    rest = x.detach()
    # The compiler unrolls a sort, which takes it long, and makes one kernel of k maxima.
    if x.device.type != "cpu" and not torch.compiler.is_compiling():  # one kernel, whatever k is
        return rest.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
    places, found = torch.arange(x.shape[-1], device=x.device), []
    for _ in range(k):
        found.append(rest.argmax(-1, keepdim=True))
        rest = rest.masked_fill(places == found[-1], -math.inf)
    return torch.cat(found, -1)


def weights_of(logits: Tensor, probabilities: Tensor, experts: Tensor, given: Experts) -> Tensor:
    """Computes the weights of the experts that are taken, `[s, b, k]`."""
    if given.moe_router_score_function == "sigmoid":
        weights = torch.sigmoid(logits.gather(-1, experts))
        if given.moe_router_topk > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    elif given.moe_router_pre_softmax:
        weights = probabilities.gather(-1, experts)
    else:
        weights = torch.softmax(logits.gather(-1, experts), -1)
    factor = given.moe_router_topk_scaling_factor
    return weights if factor is None else weights * factor


def tokens_of_experts(experts: Tensor, num_experts: int) -> Tensor:
    """`[s, b, k]` -> int64 `[b, E]`: how many tokens of each sequence take each expert."""
    if torch.compiler.is_compiling():  # one kernel that writes no comparison
        return (experts.unsqueeze(-1) == torch.arange(num_experts, device=experts.device)).sum((0, 2))
    line = experts.transpose(0, 1).flatten(1)
    counts = torch.zeros(len(line), num_experts, dtype=torch.int64, device=line.device)
    return counts.scatter_add_(1, line, torch.ones_like(line))


class Attach(Node):
    """y as it is; backward gives `loss` the gradient `share`, whatever y's is; None: y's."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, share: Tensor | None) -> Tensor:
        ctx.save_for_backward(share)
        ctx.dtype = loss.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (share,) = ctx.saved_tensors
        return dy, dy if share is None else share.to(ctx.dtype), None
