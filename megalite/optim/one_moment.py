"""Rules of one moment: SGD with momentum, and Lion, which takes only the sign of its update. Half of Adam's state, a
quarter where Lion's moment is in bf16."""

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.optim.rule import ParamGroup, UpdateRule, moment_like, pieces


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
