"""AdamW with a dtype for each moment.

With moments in the master's dtype a step is one call of torch's fused kernel. With 16-bit moments (half the optimizer
state) each step widens a piece of them, runs the kernel on it, and rounds them back. The first moment loses nothing
that matters. The second is another story: with `beta2` = 0.999 a bf16 value (8 bits) cannot take up changes below 0.4
%, so its decay stalls; keep `--exp-avg-sq-dtype fp32` unless memory forces otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw_kernel

from megalite.optim.pieces import pieces
from megalite.optim.rule import UpdateRule


class AdamW(UpdateRule):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over flat tensors.

    exp_avg_dtype, exp_avg_sq_dtype: of the moments; fp32 means "as wide as the master".
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps})
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                    for name, dtype in self.dtypes.items():
                        state[name] = torch.zeros_like(p, dtype=p.dtype if dtype == torch.float32 else dtype)
                adamw_update(p, state, group)

    def foresees(self, group: dict[str, Any]) -> bool:
        return True

    def expected_step(
        self, p: Tensor, piece: slice, group: dict[str, Any], *, lr: float, weight_decay: float
    ) -> Tensor:
        return adamw_step(p, piece, self.state[p], group, lr=lr, weight_decay=weight_decay)


def adamw_step(
    p: Tensor, piece: slice, state: dict[str, Any], group: dict[str, Any], *, lr: float, weight_decay: float
) -> Tensor:
    """The step that the moments stand for, of `p.view(-1)[piece]`: the last one, but for the decay of `p`."""
    moment, square = (state[name].view(-1)[piece].to(p.dtype) for name in ("exp_avg", "exp_avg_sq"))
    step = state["step"].double()  # stays where it is: a number would have the host wait for the device
    beta1, beta2 = group["betas"]
    denominator = (square.sqrt() / (1 - beta2**step).sqrt()).add_(group["eps"])
    direction: Tensor = (moment / (1 - beta1**step)).div_(denominator)
    return direction.add_(p.view(-1)[piece], alpha=weight_decay).mul_(-lr)


def adamw_update(p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One AdamW update of `p` from `p.grad`, with the state's moments in whatever dtype they have."""
    assert p.grad is not None
    wide = all(state[name].dtype == p.dtype for name in ("exp_avg", "exp_avg_sq"))
    update = _nadamw if group.get("nesterov") else _adamw
    for piece in [slice(None)] if wide else pieces(p):
        stored = [state[name].view(-1)[piece] for name in ("exp_avg", "exp_avg_sq")]
        moments = [moment.to(p.dtype) for moment in stored]
        update(p.view(-1)[piece], p.grad.view(-1)[piece], moments, state["step"], group)
        for narrow, value in zip(stored, moments, strict=True):
            if narrow.dtype != value.dtype:
                narrow.copy_(value)
    state["step"] += 1


def _adamw(p: Tensor, grad: Tensor, moments: list[Tensor], step: Tensor, group: dict[str, Any]) -> None:
    """torch's fused kernel. step: those before this one."""
    adamw_kernel(
        [p],
        [grad],
        moments[:1],
        moments[1:],
        [],
        [step.clone()],  # the kernel counts; pieces of one step count once
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _nadamw(p: Tensor, grad: Tensor, moments: list[Tensor], step: Tensor, group: dict[str, Any]) -> None:
    """NAdam (Dozat 2016) with constant beta1 and decoupled weight decay: the moment as the next step will have it,
    without the gradient of that step."""
    (beta1, beta2), (moment, square) = group["betas"], moments
    count = step.double() + 1
    moment.mul_(beta1).add_(grad, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    direction = moment * (beta1 / (1 - beta1 ** (count + 1))) + grad * ((1 - beta1) / (1 - beta1**count))
    direction.div_((square.sqrt() / (1 - beta2**count).sqrt()).add_(group["eps"]))
    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
