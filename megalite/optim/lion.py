"""Lion: one moment, and only the sign of the update. Half of Adam's state, a quarter with the moment in bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.optim.rule import UpdateRule


class Lion(UpdateRule):
    """Lion (Chen et al., arXiv 2302.06675): `p -= lr * (sign(beta1 m + (1 - beta1) g) + weight_decay p)`.

    Every element moves by `lr`, so the paper takes a learning rate 3 to 10 times below AdamW's and a weight decay as
    many times above. Elementwise: it runs on any flat slice.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], exp_avg_dtype: torch.dtype) -> None:
        super().__init__(groups, {"betas": betas})
        self.exp_avg_dtype = exp_avg_dtype

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    dtype = p.dtype if self.exp_avg_dtype == torch.float32 else self.exp_avg_dtype
                    state["exp_avg"] = torch.zeros_like(p, dtype=dtype)
                moment = state["exp_avg"].to(p.dtype)
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
                p.add_(moment.lerp(p.grad, 1.0 - beta1).sign_(), alpha=-group["lr"])
                state["exp_avg"].copy_(moment.lerp(p.grad, 1.0 - beta2))

    def foresees(self, group: dict[str, Any]) -> bool:
        return True

    def expected_step(
        self, p: Tensor, piece: slice, group: dict[str, Any], *, lr: float, weight_decay: float
    ) -> Tensor:
        sign: Tensor = self.state[p]["exp_avg"].view(-1)[piece].to(p.dtype).sign()
        return sign.add_(p.view(-1)[piece], alpha=weight_decay).mul_(-lr)
