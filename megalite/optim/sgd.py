"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.optim.rule import UpdateRule


class SGD(UpdateRule):
    """`m = momentum m + g'; p -= lr m`, where `g' = g + weight_decay p` (decay in the gradient, as is usual for SGD).

    With `nesterov` in a group: `p -= lr (g' + momentum m)`.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float) -> None:
        super().__init__(groups, {"momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                gradient = p.grad.add(p, alpha=group["weight_decay"]) if group["weight_decay"] else p.grad
                if group["momentum"]:
                    state = self.state[p]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
                    gradient = gradient.add(buffer, alpha=group["momentum"]) if group.get("nesterov") else buffer
                p.add_(gradient, alpha=-group["lr"])

    def foresees(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"])

    def expected_step(
        self, p: Tensor, piece: slice, group: dict[str, Any], *, lr: float, weight_decay: float
    ) -> Tensor:
        buffer: Tensor = self.state[p]["momentum_buffer"]  # weight decay is in it
        return buffer.view(-1)[piece] * -lr
