"""Tokens on their way to their experts and back.

    choices (token, expert), k a token     sorted by expert, dropped ones left out
    over ep     a message of counts, one of rows; what arrives is sorted by local expert, and by rank
    back        the same way; the k results of a token are added up in the order of its choices

Rows are copied to where one row goes, never added at random: results do not depend on the order of arrival, and a
token's sum has the same order of additions at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalite.comm import Axis, all_to_all, all_to_all_rows


@dataclass(frozen=True)
class Plan:
    """One micro-batch's way in one layer.

    tokens, choices: n and k. order: int64 `[m]`, which of the n * k choices each row is that leaves here. places: int64
    `[n * k]`, which row each choice is; None: some were dropped. sent,
    received: rows to and from each rank of the axis. arrangement: int64, which received row comes first, second ...;
    None: as they are. counts: rows of each expert that is here.
    """

    tokens: int
    choices: int
    order: Tensor
    places: Tensor | None
    sent: tuple[int, ...]
    received: tuple[int, ...]
    arrangement: Tensor | None
    counts: tuple[int, ...]
    axis: Axis


def plan_dispatch(experts: Tensor, kept: Tensor | None, num_experts: int, axis: Axis) -> Plan:
    """The plan for the choices `[n, k]` (int64) of this rank's tokens. kept: bool `[n, k]`, None: all. Collective."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    if kept is not None:
        order = order[kept.flatten()[order]]
    counts = torch.bincount(flat[order], minlength=num_experts).view(axis.size, -1)
    arriving = all_to_all(counts, axis)
    arrangement = None
    if axis.size > 1:
        here = torch.arange(arriving.numel(), device=flat.device) % arriving.shape[1]
        arrangement = here.repeat_interleave(arriving.flatten()).argsort(stable=True)
    table, own = arriving.tolist(), counts.sum(1).tolist()
    return Plan(
        tokens=experts.shape[0],
        choices=experts.shape[1],
        order=order,
        places=places if kept is None else None,
        sent=tuple(own),
        received=tuple(map(sum, table)),
        arrangement=arrangement,
        counts=tuple(map(sum, zip(*table, strict=True))),
        axis=axis,
    )


def dispatch(x: Tensor, plan: Plan) -> Tensor:
    """Tokens `[n, h]` -> rows of the experts that are here, one expert after the other, `[sum(counts), h]`."""
    return _Dispatch.apply(x, plan)


def combine(y: Tensor, weights: Tensor, plan: Plan) -> Tensor:
    """The experts' results, in the order of `dispatch`, times `weights` `[n, k]`, added up: `[n, h]`."""
    return _Combine.apply(y, weights, plan)


class _Dispatch(Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch's own has no type

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return _there(x.index_select(0, plan.order // plan.choices), plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dx = _back(dy, ctx.plan)
        return (dx[:, 0] + dx[:, 1] if dx.shape[1] == 2 else dx.sum(1)), None  # several times as fast, the same bits


class _Combine(Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch's own has no type

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, plan: Plan) -> Tensor:
        results = _back(y, plan)
        ctx.plan = plan
        ctx.save_for_backward(results, weights)
        scale = weights.to(y.dtype)
        total = results[:, 0] * scale[:, :1]
        for choice in range(1, plan.choices):
            total.addcmul_(results[:, choice], scale[:, choice : choice + 1])
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        results, weights = ctx.saved_tensors
        plan: Plan = ctx.plan
        dweights = torch.stack(
            [(results[:, choice] * dy).sum(-1, dtype=weights.dtype) for choice in range(plan.choices)], 1
        )
        rows = dy.index_select(0, plan.order // plan.choices)
        rows *= weights.to(dy.dtype).flatten()[plan.order, None]
        return _there(rows, plan), dweights, None


def _there(rows: Tensor, plan: Plan) -> Tensor:
    """Rows in the order of this rank's choices -> rows in the order of the experts that are here."""
    rows = all_to_all_rows(rows, plan.sent, plan.received, plan.axis)
    return rows if plan.arrangement is None else rows.index_select(0, plan.arrangement)


def _back(rows: Tensor, plan: Plan) -> Tensor:
    """The inverse, `[n, k, h]`, zero where a choice was dropped."""
    if plan.arrangement is not None:
        rows = torch.empty_like(rows).index_copy_(0, plan.arrangement, rows)
    rows = all_to_all_rows(rows, plan.received, plan.sent, plan.axis)
    if plan.places is not None:
        spread = rows.index_select(0, plan.places)
    else:
        spread = rows.new_zeros(plan.tokens * plan.choices, rows.shape[1]).index_copy_(0, plan.order, rows)
    return spread.view(plan.tokens, plan.choices, rows.shape[1])
