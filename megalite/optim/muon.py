"""Muon: momentum, made orthogonal. Whole matrices only; everything else gets AdamW.

    m = momentum * m + g                  the buffer, one value an element: half of Adam's state
    u = g + momentum * m                  Nesterov (or u = m)
    p = p - lr * (scale * orthogonal(u) + weight_decay * p)

`orthogonal` replaces the singular values of u by about 1, with five Newton-Schulz steps (Jordan et al. 2024,
kellerjordan.github.io/posts/muon). A matrix that tensor parallelism cuts is gathered first: orthogonalising the parts
is not orthogonalising the whole. Which matrices: those of the blocks; embeddings, output layer, norms and biases are
AdamW's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from megalite.comm import Axis, all_gather
from megalite.inventory import Placement
from megalite.optim.adamw import adamw_step, adamw_update
from megalite.optim.rule import UpdateRule

ScaleMode = Literal["spectral", "shape_scaling", "unit_rms_norm"]


class Muon(UpdateRule):
    """Muon for groups with `whole`, AdamW for the others.

    Args:
        groups: `whole` groups hold tensors in their parameter's local shape, their `placements` and the `cut_axes`.
        scale_mode: factor that the orthogonal update is multiplied by, for a matrix `[rows, columns]`:
            spectral `sqrt(max(rows, columns))`, which with `extra_scale` 0.2 has AdamW's usual size, so that AdamW's
            learning rate and weight decay carry over (Liu et al., arXiv 2502.16982); shape_scaling
            `sqrt(max(1, rows / columns))` (Jordan); unit_rms_norm `sqrt(rows / columns)` (Bernstein).
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        scale_mode: ScaleMode = "spectral",
        extra_scale: float = 0.2,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps})
        self.momentum, self.nesterov, self.ns_steps = momentum, nesterov, ns_steps
        self.scale_mode, self.extra_scale = scale_mode, extra_scale

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                if group["whole"]:
                    self._update_matrix(p, state, group, group["placements"][i])
                    state["step"] += 1
                else:
                    for name in ("exp_avg", "exp_avg_sq"):
                        if name not in state:
                            state[name] = torch.zeros_like(p)
                    adamw_update(p, state, group)

    def foresees(self, group: dict[str, Any]) -> bool:
        return not group["whole"]  # a matrix would have to be made orthogonal once more

    def expected_step(
        self, p: Tensor, piece: slice, group: dict[str, Any], *, lr: float, weight_decay: float
    ) -> Tensor:
        return adamw_step(p, piece, self.state[p], group, lr=lr, weight_decay=weight_decay)

    def _update_matrix(self, p: Tensor, state: dict[str, Tensor], group: dict[str, Any], placement: Placement) -> None:
        assert p.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"]
        buffer.mul_(self.momentum).add_(p.grad)
        update = p.grad + self.momentum * buffer if self.nesterov else buffer
        whole, dim, axis = gather_matrix(update, placement, group.get("cut_axes", ()))
        whole = orthogonalise(whole, self.ns_steps)
        if axis is not None:
            whole = whole.narrow(dim, axis.rank * p.shape[dim], p.shape[dim])
        rows, columns = placement.global_shape[-2:]
        scale = self.extra_scale * matrix_scale(rows, columns, self.scale_mode)
        p.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(whole.to(p.dtype), alpha=-group["lr"] * scale)


def matrix_scale(rows: int, columns: int, mode: ScaleMode) -> float:
    """See `Muon.scale_mode`."""
    if mode == "spectral":
        return float(max(rows, columns) ** 0.5)
    ratio = rows / columns
    return float(max(1.0, ratio) ** 0.5 if mode == "shape_scaling" else ratio**0.5)


def gather_matrix(local: Tensor, placement: Placement, cut_axes: Sequence[Axis]) -> tuple[Tensor, int, Axis | None]:
    """(the whole matrix, the dimension that is cut, the axis that cuts it: None where none does)."""
    if not placement.sharded:
        return local, 0, None
    axes = [axis for axis in cut_axes if axis.name in placement.sharded]
    assert len(axes) == len(placement.sharded) == 1, "a matrix is gathered over one axis"
    cut = [d for d, (have, total) in enumerate(zip(local.shape, placement.global_shape, strict=True)) if have != total]
    assert len(cut) == 1, "a matrix is cut along one dimension"
    dim = cut[0]
    return all_gather(local.transpose(0, dim).contiguous(), axes[0]).transpose(0, dim), dim, axes[0]


def orthogonalise(x: Tensor, steps: int) -> Tensor:
    """`[..., rows, columns]` with all singular values brought to about 1 (0.7 to 1.2), signs and directions kept.

    Odd quintic Newton-Schulz iteration, in bf16 on a GPU (its errors are far below what the iteration leaves), in the
    given dtype elsewhere.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    y: Tensor = x.to(torch.bfloat16) if x.is_cuda else x
    tall = y.shape[-2] > y.shape[-1]
    if tall:
        y = y.mT
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.mT if tall else y
