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
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalite.comm import Axis, Done, Handle, all_gather, start_all_to_all_rows
from megalite.gradient import WIDENED_ELEMENTS


@dataclass(frozen=True)
class Plan:
    """One micro-batch's way in one layer.

    tokens, choices: n and k. order: int64 `[m]`, which of the n * k choices each row is that leaves here. owners: int64
    `[m]`, whose choice. places: int64 `[n, k]`, which row each choice is; None: some were dropped.
    traffic[i][j]: rows from rank i of the axis to rank j. arrangement: int64, which received row comes first, second
    ...; None: as they are. counts: rows of each expert that is here.
    """

    tokens: int
    choices: int
    order: Tensor
    owners: Tensor
    places: Tensor | None
    traffic: tuple[tuple[int, ...], ...]
    arrangement: Tensor | None
    counts: tuple[int, ...]
    axis: Axis

    @property
    def traffic_back(self) -> tuple[tuple[int, ...], ...]:
        return tuple(zip(*self.traffic, strict=True))


def plan_dispatch(experts: Tensor, kept: Tensor | None, num_experts: int, axis: Axis) -> Plan:
    """The plan for the choices `[n, k]` (int64) of this rank's tokens. kept: bool `[n, k]`, None: all. Collective."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    if kept is not None:
        order = order[kept.flatten()[order]]
    counts = torch.bincount(flat[order], minlength=num_experts).view(1, axis.size, -1)
    everyone = all_gather(counts, axis)  # [ep, ep, E/ep]: small, and a rank knows what the others send each other
    arriving = everyone[:, axis.rank]
    arrangement = None
    if axis.size > 1:
        here = torch.arange(arriving.numel(), device=flat.device) % arriving.shape[1]
        arrangement = here.repeat_interleave(arriving.flatten()).argsort(stable=True)
    traffic, table = everyone.sum(2).tolist(), arriving.tolist()
    return Plan(
        tokens=experts.shape[0],
        choices=experts.shape[1],
        order=order,
        owners=order // experts.shape[1],
        places=places.view_as(experts) if kept is None else None,
        traffic=tuple(map(tuple, traffic)),
        arrangement=arrangement,
        counts=tuple(map(sum, zip(*table, strict=True))),
        axis=axis,
    )


class Dispatched:
    """Tokens `[n, h]` on their way; other work may be done until they are waited for, and in backward until theirs are.

    Backward runs what came later in forward first: what is computed in between hides both messages.
    """

    def __init__(self, x: Tensor, plan: Plan) -> None:
        self._plan, self._trip = plan, _Trip()
        self._rows = _Depart.apply(x, plan, self._trip)

    def wait(self) -> Tensor:
        """Rows of the experts that are here, one expert after the other, `[sum(counts), h]`."""
        return self._rows if self._plan.axis.size == 1 else _Arrive.apply(self._rows, self._plan, self._trip)


def combine(y: Tensor, weights: Tensor, plan: Plan) -> Tensor:
    """The experts' results, in the order in which they came, times `weights` `[n, k]`, added up: `[n, h]`."""
    return _Combine.apply(y, weights, plan)


class _Trip:
    """What is to be waited for, and where it arrives: the rows in forward, their gradients in backward."""

    rows: Tensor
    forward: Handle = Done()
    backward: Handle = Done()


class _Depart(Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch's own has no type

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, trip: _Trip) -> Tensor:
        ctx.plan, ctx.trip = plan, trip
        rows = x.index_select(0, plan.owners)
        trip.rows, trip.forward = start_all_to_all_rows(rows, plan.traffic, plan.axis)
        return rows  # as many as their gradients, which _Arrive returns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.trip.backward.wait()
        return _sums(dy, None, ctx.plan), None, None


class _Arrive(Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch's own has no type

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: Plan, trip: _Trip) -> Tensor:
        ctx.plan, ctx.trip = plan, trip
        trip.forward.wait()
        rows = _arranged(trip.rows, plan)
        del trip.rows
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        plan: Plan = ctx.plan
        rows, ctx.trip.backward = start_all_to_all_rows(_as_received(dy, plan), plan.traffic_back, plan.axis)
        return rows, None, None


class _Combine(Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch's own has no type

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, plan: Plan) -> Tensor:
        results = _back(y, plan)
        ctx.plan = plan
        ctx.save_for_backward(results, weights)
        return _sums(results, weights.to(y.dtype), plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        results, weights = ctx.saved_tensors
        plan: Plan = ctx.plan
        rows = dy.index_select(0, plan.owners)
        dweights = torch.zeros_like(weights)
        dweights.view(-1)[plan.order] = _row_products(results, rows, weights.dtype)
        rows *= weights.to(dy.dtype).flatten()[plan.order, None]
        return _there(rows, plan), dweights, None


def _there(rows: Tensor, plan: Plan) -> Tensor:
    """Rows in the order of this rank's choices -> rows in the order of the experts that are here."""
    rows, handle = start_all_to_all_rows(rows, plan.traffic, plan.axis)
    handle.wait()
    return _arranged(rows, plan)


def _back(rows: Tensor, plan: Plan) -> Tensor:
    """The inverse."""
    rows, handle = start_all_to_all_rows(_as_received(rows, plan), plan.traffic_back, plan.axis)
    handle.wait()
    return rows


def _arranged(rows: Tensor, plan: Plan) -> Tensor:
    """Rows as they arrive -> one expert after the other."""
    return rows if plan.arrangement is None else rows.index_select(0, plan.arrangement)


def _as_received(rows: Tensor, plan: Plan) -> Tensor:
    """The inverse."""
    return rows if plan.arrangement is None else torch.empty_like(rows).index_copy_(0, plan.arrangement, rows)


def _sums(rows: Tensor, weights: Tensor | None, plan: Plan) -> Tensor:
    """Of each token's rows (in the order in which they left), times its weights `[n, k]`: `[n, h]`. One pass over
    memory; 16-bit rows are added in fp32."""
    places = plan.places
    if places is None:  # of a choice that was dropped: zeros
        rows = rows.new_zeros(plan.tokens * plan.choices, rows.shape[1]).index_copy_(0, plan.order, rows)
        places = torch.arange(len(rows), device=rows.device).view(plan.tokens, plan.choices)
    return F.embedding_bag(places, rows.detach(), mode="sum", per_sample_weights=weights)


def _row_products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`[m, h]` twice -> `[m]`: the inner product of each pair of rows, in dtype; on a CPU in pieces that stay in its
    cache."""
    piece = max(1, WIDENED_ELEMENTS // a.shape[1]) if a.device.type == "cpu" else max(1, len(a))
    return torch.cat([(x * y).sum(-1, dtype=dtype) for x, y in zip(a.split(piece), b.split(piece), strict=True)])
