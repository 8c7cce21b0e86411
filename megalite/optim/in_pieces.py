"""AdamW where torch's kernel does not do all of it: moments of 16 bits, and Nesterov's direction.

Piece by piece, so that what a step needs beside a long tensor stays small.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.optim.rule import ParamGroup, UpdateRule, pieces

MOMENTS = ("exp_avg", "exp_avg_sq")
Kernel = Callable[[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], ParamGroup], None]
"""AdamW of tensors with these gradients, moments and numbers of steps, which it counts."""


@torch.no_grad()
def step_in_pieces(rule: UpdateRule, kernel: Kernel, p: Tensor, group: ParamGroup) -> None:
    """One step of one tensor, whose state is there. kernel: of a piece, without Nesterov's direction."""
    state, flat = rule.state[p], p.view(-1)
    assert p.grad is not None
    grads = p.grad.view(-1)
    for piece in pieces(p):
        stored = [state[name].view(-1)[piece] for name in MOMENTS]
        moments = [moment.to(p.dtype) for moment in stored]
        if group.get("nesterov"):
            _nadamw(rule, flat[piece], grads[piece], moments, state["step"], group)
        else:
            kernel([flat[piece]], [grads[piece]], moments[:1], moments[1:], [state["step"].clone()], group)
        for narrow, value in zip(stored, moments, strict=True):
            if narrow.dtype != value.dtype:
                narrow.copy_(value)  # unchanged if the step is skipped
    rule.count(state["step"])


def _nadamw(rule: UpdateRule, p: Tensor, grad: Tensor, moments: list[Tensor], step: Tensor, group: ParamGroup) -> None:
    """NAdam (Dozat 2016) with constant beta1 and decoupled weight decay: the moment as the next step will have it,
    without the gradient of that step. step: number of steps before this one."""
    (beta1, beta2), (moment, square) = group["betas"], moments
    count = step.double() + 1
    rule.write(moment, moment.mul(beta1).add_(grad, alpha=1 - beta1))
    rule.write(square, square.mul(beta2).addcmul_(grad, grad, value=1 - beta2))
    direction = moment * (beta1 / (1 - beta1 ** (count + 1))) + grad * ((1 - beta1) / (1 - beta1**count))
    direction.div_((square.sqrt() / (1 - beta2**count).sqrt()).add_(group["eps"]))
    rule.write(p, p.mul(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"]))
