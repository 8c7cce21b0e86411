"""Stochastic gradient descent with momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.optim.rule import ParamGroup, UpdateRule, pieces


class SGD(UpdateRule):
    """`m = momentum m + g'; p -= lr m`, where `g' = g + weight_decay p` (decay in the gradient, as is usual for SGD).

    With `nesterov` in a group: `p -= lr (g' + momentum m)`.
    """

    def __init__(self, groups: list[ParamGroup], settings: OptimizerConfig) -> None:
        super().__init__(groups, momentum=settings.args.sgd_momentum)

    @torch.no_grad()
    def step(self) -> None:
        for p, grad, group, _ in self.with_gradients():
            state = self.state[p]
            if group["momentum"] and not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            for piece in pieces(p):
                kept = state["momentum_buffer"].view(-1)[piece] if group["momentum"] else None
                self._update(p.view(-1)[piece], grad.view(-1)[piece], kept, group)

    def _update(self, p: Tensor, grad: Tensor, kept: Tensor | None, group: ParamGroup) -> None:
        if group["weight_decay"]:
            grad = grad.add(p, alpha=group["weight_decay"])
        if kept is not None:
            buffer = kept.mul(group["momentum"]).add_(grad)
            grad = grad.add(buffer, alpha=group["momentum"]) if group.get("nesterov") else buffer
            self.write(kept, buffer)
        self.write(p, p.add(grad, alpha=-group["lr"]))

    def foresees(self, group: ParamGroup) -> bool:
        return bool(group["momentum"])

    def expected_step(self, p: Tensor, piece: slice, group: ParamGroup, lr: float, weight_decay: float) -> Tensor:
        buffer: Tensor = self.state[p]["momentum_buffer"]  # weight decay is in it
        return buffer.view(-1)[piece] * -lr
