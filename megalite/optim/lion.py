"""Lion: one moment, and only the sign of the update. Half of Adam's state, a quarter with the moment in bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.optim.rule import ParamGroup, UpdateRule, moment_like, pieces


class Lion(UpdateRule):
    """Lion (Chen et al., arXiv 2302.06675): `p -= lr * (sign(beta1 m + (1 - beta1) g) + weight_decay p)`.

    Every element moves by `lr`, so the paper takes a learning rate 3 to 10 times below AdamW's and a weight decay as
    many times above. Elementwise: it runs on any flat slice.
    """

    def __init__(self, groups: list[ParamGroup], settings: OptimizerConfig) -> None:
        super().__init__(groups, betas=(settings.args.lion_beta1, settings.args.lion_beta2))
        self.exp_avg_dtype = settings.exp_avg_dtype

    @torch.no_grad()
    def step(self) -> None:
        for p, grad, group, _ in self.with_gradients():
            state = self.state[p]
            (beta1, beta2) = group["betas"]
            if not state:
                state["exp_avg"] = moment_like(p, self.exp_avg_dtype)
            weights, gradient, moments = p.view(-1), grad.view(-1), state["exp_avg"].view(-1)
            for piece in pieces(p):
                moment = moments[piece].to(p.dtype)
                self.descend(weights[piece], moment.lerp(gradient[piece], 1.0 - beta1).sign_(), group)
                self.write(moments[piece], moment.lerp(gradient[piece], 1.0 - beta2))

    def foresees(self, group: ParamGroup) -> bool:
        return True

    def expected_step(self, p: Tensor, piece: slice, group: ParamGroup, lr: float, weight_decay: float) -> Tensor:
        sign: Tensor = self.state[p]["exp_avg"].view(-1)[piece].to(p.dtype).sign()
        return sign.add_(p.view(-1)[piece], alpha=weight_decay).mul_(-lr)
