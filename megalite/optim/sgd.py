"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any

import torch

from megalite.optim.rule import UpdateRule


class SGD(UpdateRule):
    """`m = momentum m + g + weight_decay p; p -= lr m` (decay in the gradient, as is usual for SGD)."""

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
                    gradient = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
                p.add_(gradient, alpha=-group["lr"])
