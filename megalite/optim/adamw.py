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

from megalite.optim.rule import UpdateRule

PIECE = 1 << 22
"""Elements widened at once: bounds the transient memory of a step (2 x 16 MB in fp32)."""


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


def adamw_update(p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One AdamW update of `p` from `p.grad`, with the state's moments in whatever dtype they have."""
    assert p.grad is not None
    wide = all(state[name].dtype == p.dtype for name in ("exp_avg", "exp_avg_sq"))
    for begin in range(0, p.numel(), p.numel() if wide else PIECE):
        piece = slice(begin, None if wide else begin + PIECE)
        stored = [state[name].view(-1)[piece] for name in ("exp_avg", "exp_avg_sq")]
        moments = [moment.to(p.dtype) for moment in stored]
        adamw_kernel(
            [p.view(-1)[piece]],
            [p.grad.view(-1)[piece]],
            [moments[0]],
            [moments[1]],
            [],
            [state["step"].clone()],  # the kernel counts; pieces of one step count once
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for narrow, value in zip(stored, moments, strict=True):
            if narrow.dtype != value.dtype:
                narrow.copy_(value)
    state["step"] += 1
