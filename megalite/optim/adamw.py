"""AdamW with moments in 16 bits: half the optimizer state, the arithmetic still in the master's precision.

Each step widens a piece of the moments, runs the fused kernel on it, and rounds the moments back. The first moment
loses nothing that matters. The second is another story: with `beta2` = 0.999 a bf16 value (8 bits) cannot take up
changes below 0.4 %, so its decay stalls; keep `--exp-avg-sq-dtype fp32` unless memory forces otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw_kernel

PIECE = 1 << 22
"""Elements widened at once: bounds the transient memory of a step (2 x 16 MB in fp32)."""


class MixedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over flat tensors with a dtype for each moment."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "betas": betas, "eps": eps})
        self.exp_avg_dtype = exp_avg_dtype
        self.exp_avg_sq_dtype = exp_avg_sq_dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                        state["exp_avg"] = torch.zeros_like(p, dtype=self.exp_avg_dtype)
                        state["exp_avg_sq"] = torch.zeros_like(p, dtype=self.exp_avg_sq_dtype)
                    for begin in range(0, p.numel(), PIECE):
                        piece = slice(begin, begin + PIECE)
                        adamw_piece(p.view(-1)[piece], p.grad.view(-1)[piece], state, piece, group)
                    state["step"] += 1


def adamw_piece(p: Tensor, gradient: Tensor, state: dict[str, Tensor], piece: slice, group: dict[str, Any]) -> None:
    """One AdamW update of `p`, a piece of a flat parameter, with the moments `state[...][piece]` widened to its dtype.

    Does not advance `state["step"]`.
    """
    moments = [state[name].view(-1)[piece] for name in ("exp_avg", "exp_avg_sq")]
    wide = [moment.to(p.dtype) for moment in moments]  # the moment itself where it is wide already
    adamw_kernel(
        [p],
        [gradient],
        [wide[0]],
        [wide[1]],
        [],
        [state["step"].clone()],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for moment, value in zip(moments, wide, strict=True):
        if moment.dtype != value.dtype:
            moment.copy_(value)
