"""Experts as their definition says it: every expert computes every token, in a loop, and the losses are added to the
loss. No permutation, no message, no gradient by hand: what `nn.experts` must equal.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import Experts, ModelConfig
from megalite.nn.activation import activation_of
from megalite.nn.experts import MoE, StackedLinear
from megalite.nn.segment import Segment
from megalite.parallel.tensor import LowRank


class PlainExperts:
    """Takes the place of `MoE.segments` in a model of one process.

    losses: what the layers add to the loss of a micro-batch, without its weight.
    counts: by the name of a layer's bias, how often each expert was chosen since `move`.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.losses = config, list[Tensor]()
        self.counts: dict[str, Tensor] = {}

    def replace(self, model: nn.Module) -> None:
        """In all blocks of the model."""
        for path, module in model.named_modules():
            if isinstance(module, MoE):
                module.segments = self._segments(module, path)  # type: ignore[method-assign]  # in its place

    def take(self) -> Tensor | float:
        """The sum over the layers since the last call."""
        total = sum(self.losses)
        self.losses.clear()
        return total

    def move(self, biases: dict[str, Tensor]) -> None:
        """Moves every bias: up where an expert has fewer tokens than the mean, down where it has more."""
        for name, counts in self.counts.items():
            mean, rate = counts.sum() / len(counts), self.config.experts.moe_router_bias_update_rate
            biases[name] = biases[name] + rate * torch.sign(mean - counts)
        self.counts.clear()

    def _segments(self, module: MoE, path: str) -> Any:
        def segments(*_: Any) -> list[Segment]:
            return [Segment(lambda x: x), Segment(lambda x: self._forward(module, f"{path}.router.expert_bias", x))]

        return segments

    def _forward(self, module: MoE, name: str, x: Tensor) -> Tensor:
        given, k = self.config.experts, self.config.experts.moe_router_topk
        number = given.num_experts or 1
        logits = x.to(module.router.weight.dtype) @ module.router.weight.t()
        logits = logits if module.router.bias is None else logits + module.router.bias
        bias = module.router.expert_bias
        added = [0.0] * number if bias is None else bias.tolist()
        best = [[best_experts(token, given, added) for token in row] for row in logits.tolist()]
        taken = torch.zeros_like(logits).scatter_(-1, torch.tensor(best), 1.0)
        if bias is not None:
            self.counts[name] = self.counts.get(name, 0) + taken.sum((0, 1))
        weights = token_weights(logits, taken, given)
        self.losses.append(layer_losses(logits, taken, given))
        if given.moe_expert_capacity_factor is not None:
            capacity = math.ceil(given.moe_expert_capacity_factor * k * x.shape[0] / number)
            weights = weights * (taken.cumsum(0) <= capacity)
        y = torch.zeros_like(x)
        for e in range(number):
            y = y + weights[..., e : e + 1].to(x.dtype) * self._expert(module, e, x)
        shared = module.shared_experts
        if shared is None:
            return y
        gate = 1.0 if module.shared_gate is None else torch.sigmoid(x @ module.shared_gate.weight.t())
        beside: Tensor = shared.fc2(shared.fc1(x))
        return y + gate * beside

    def _expert(self, module: MoE, e: int, x: Tensor) -> Tensor:
        up, down = module.experts.fc1, module.experts.fc2
        hidden = x @ up.weight[e].flatten(0, -2).t()
        hidden = hidden if up.bias is None else hidden + up.bias[e].flatten()
        hidden = activation_of(self.config)[0](hidden + self._low_rank(up, e, x))
        y = hidden @ down.weight[e].t() + self._low_rank(down, e, hidden)
        return y if down.bias is None else y + down.bias[e]

    def _low_rank(self, linear: StackedLinear, e: int, x: Tensor) -> Tensor | float:
        """What the adapter of an expert adds, if there is one."""
        total: Tensor | float = 0.0
        for pair in linear.modules():
            if not isinstance(pair, LowRank):
                continue
            a, b = pair.lora_a[0 if len(pair.lora_a) == 1 else e], pair.lora_b[e].flatten(0, -2)
            lora = self.config.lora
            total = total + (lora.lora_alpha or lora.lora_rank or 1) / (lora.lora_rank or 1) * (x @ a.t() @ b.t())
        return total


def best_experts(logits: list[float], given: Experts, bias: list[float]) -> list[int]:
    """Of one token, by Python's own stable sort."""
    values = list(logits)
    if given.moe_router_score_function == "sigmoid":
        values = [1 / (1 + math.exp(-x)) + b for x, b in zip(logits, bias, strict=True)]
    elif given.moe_router_pre_softmax:
        values = [math.exp(x) / sum(map(math.exp, logits)) for x in logits]
    allowed = list(range(len(values)))
    groups, chosen = given.moe_router_num_groups, given.moe_router_group_topk
    if groups is not None and chosen is not None:
        size = len(values) // groups
        members = [allowed[g * size : (g + 1) * size] for g in range(groups)]
        count = min(max(1, given.moe_router_topk // chosen), size)
        score = [sum(sorted((values[e] for e in group), reverse=True)[:count]) for group in members]
        best = sorted(range(groups), key=lambda g: (-score[g], g))[:chosen]
        allowed = [e for g in best for e in members[g]]
    return sorted(allowed, key=lambda e: (-values[e], e))[: given.moe_router_topk]


def token_weights(logits: Tensor, taken: Tensor, given: Experts) -> Tensor:
    """Of every token's experts, `[s, b, E]`, 0 for those that it does not take."""
    if given.moe_router_score_function == "sigmoid":
        weights = logits.sigmoid() * taken
        weights = weights / weights.sum(-1, keepdim=True) if given.moe_router_topk > 1 else weights
    elif given.moe_router_pre_softmax:
        weights = logits.softmax(-1) * taken
    else:
        weights = logits.exp() * taken
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * (given.moe_router_topk_scaling_factor or 1.0)


def layer_losses(logits: Tensor, taken: Tensor, given: Experts) -> Tensor:
    """What one layer adds for a micro-batch `[s, b, E]`: the auxiliary loss and the z-loss, with their coefficients."""
    probabilities = logits.softmax(-1)
    if given.moe_router_score_function == "sigmoid":
        probabilities = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    whole = given.moe_router_load_balancing_type == "aux_loss"
    dims = (0, 1) if whole else (0,)
    product = taken.mean(dims) * probabilities.mean(dims)
    balance = logits.shape[-1] / given.moe_router_topk * product.sum(-1).mean()
    if given.moe_router_load_balancing_type == "none":
        balance = balance * 0
    z = logits.exp().sum(-1).log().square().mean()
    return given.moe_aux_loss_coeff * balance + given.moe_z_loss_coeff * z
