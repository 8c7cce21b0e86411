"""Tokens on their way to their experts and back.

    choices (token, expert), k a token     sorted by expert, dropped ones left out
    over ep     a message of counts, one of rows; what arrives is sorted by local expert, and by rank
    back        the same way; the k results of a token are added up in the order of its choices

Rows are copied to where one row goes, never added at random: results do not depend on the order of arrival, and a
token's sum has the same order of additions at any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.comm import Axis, Done, Handle, all_gather, start_all_to_all_rows
from megalite.gradient import WIDENED_ELEMENTS, Node
from megalite.late_reading import LateReading
from megalite.parallel.expert.row_counts import RowCounts


@dataclass(frozen=True)
class Plan:
    """Dispatch plan of one layer and micro-batch.

    tokens, choices: n and k.
    order: int64 `[m]`, which of the n * k choices each row is that leaves this rank.
    owners: int64 `[m]`, the token of each row.
    places: int64 `[n, k]`, the row of each choice; of one that was dropped a number behind all rows.
    traffic[i][j]: rows from rank i of the axis to rank j.
    arrangement: int64, which received row comes first, second ...; None: they stay in their order.
    counts: rows of this rank's experts.
    """

    tokens: int
    choices: int
    order: Tensor
    owners: Tensor
    places: Tensor
    traffic: tuple[tuple[int, ...], ...]
    arrangement: Tensor | None
    counts: RowCounts
    axis: Axis

    @property
    def traffic_back(self) -> tuple[tuple[int, ...], ...]:
        return tuple(zip(*self.traffic, strict=True))


def plan_dispatch(
    experts: Tensor, kept: Tensor | None, num_experts: int, axis: Axis, counts: Tensor | None = None
) -> Plan:
    """The plan for the choices `[n, k]` (int64) of this rank's tokens. kept: bool `[n, k]`, None: all. counts: how
    often each expert was chosen, int64 `[E]`, where somebody knows and none is dropped. Collective.

    The host waits only for a table of counts, where rows travel or some are dropped, and not for what sorts them.
    """
    flat = experts.flatten()
    if kept is not None:  # behind all others
        flat = flat.masked_fill(~kept.flatten(), num_experts)
    if counts is None:
        counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:-1]
    everyone = all_gather(
        counts.view(1, axis.size, -1), axis
    )  # [ep, ep, E/ep]: small, and a rank knows what the others send each other
    reading = LateReading(everyone)
    order = flat.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    traffic, arrangement, arrived = [[len(order)]], None, len(order)
    if axis.size > 1 or kept is not None:
        traffic = [[sum(each) for each in ranks] for ranks in reading.read()]
        order = order[: sum(traffic[axis.rank])]
        arrived = sum(row[axis.rank] for row in traffic)
    if axis.size > 1:
        arriving = everyone[:, axis.rank]
        local = torch.arange(arriving.numel(), device=flat.device) % arriving.shape[1]
        arrangement = local.repeat_interleave(arriving.flatten(), output_size=arrived).argsort(stable=True)
    return Plan(
        tokens=experts.shape[0],
        choices=experts.shape[1],
        order=order,
        owners=order // experts.shape[1],
        places=places.view_as(experts),
        traffic=tuple(map(tuple, traffic)),
        arrangement=arrangement,
        counts=RowCounts(everyone, axis.rank, reading, arrived),
        axis=axis,
    )


class Dispatched:
    """Tokens `[n, h]` on their way; other work may be done until they are waited for, and in backward until theirs are.

    Backward runs what came later in forward first: what is computed in between hides both messages.
    rows: stands for them in autograd's graph until they are waited for.
    """

    def __init__(self, x: Tensor, plan: Plan) -> None:
        self._plan, self._flight = plan, _InFlight()
        self.rows = _Depart.apply(x, plan, self._flight)

    def wait(self) -> Tensor:
        """Rows of this rank's experts, one expert after the other, `[sum(counts), h]`."""
        return self.rows if self._plan.axis.size == 1 else _Arrive.apply(self.rows, self._plan, self._flight)

    @property
    def counts(self) -> RowCounts:
        """Rows of this rank's experts."""
        return self._plan.counts

    def back(self, y: Tensor) -> Returning:
        """Starts the experts' results on their way back."""
        return Returning(y, self._plan)


class Returning:
    """The experts' results `[sum(counts), h]`, in the order in which they came, on their way back to their tokens.

    rows: stands for them in autograd's graph until they are combined.
    """

    def __init__(self, y: Tensor, plan: Plan) -> None:
        self._plan, self._flight = plan, _InFlight()
        self.rows = y if plan.axis.size == 1 else _Return.apply(y, plan, self._flight)

    def combine(self, weights: Tensor) -> Tensor:
        """The sum of each token's results times its `weights` `[n, k]`: `[n, h]`."""
        return _Combine.apply(self.rows, weights, self._plan, self._flight)


class _InFlight:
    """Messages in flight, of the forward and of the backward, and the rows that arrive with them."""

    rows: Tensor
    forward: Handle = Done()
    backward: Handle = Done()


class _Depart(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, flight: _InFlight) -> Tensor:
        ctx.plan, ctx.flight = plan, flight
        rows = x.index_select(0, plan.owners)
        if plan.axis.size == 1:  # in flight it would hold itself, through the node that holds the flight
            return rows
        flight.rows, flight.forward = start_all_to_all_rows(rows, plan.traffic, plan.axis)
        return rows.new_empty(()).expand_as(rows)  # the shape of their gradients, which _Arrive returns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.flight.backward.wait()
        return _sums(dy, None, ctx.plan), None, None


class _Arrive(Node):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: Plan, flight: _InFlight) -> Tensor:
        ctx.plan, ctx.flight = plan, flight
        flight.forward.wait()
        rows = _arranged(flight.rows, plan)
        del flight.rows
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        plan: Plan = ctx.plan
        rows, ctx.flight.backward = start_all_to_all_rows(_as_received(dy, plan), plan.traffic_back, plan.axis)
        return rows, None, None


class _Return(Node):
    @staticmethod
    def forward(ctx: Any, y: Tensor, plan: Plan, flight: _InFlight) -> Tensor:
        ctx.plan, ctx.flight = plan, flight
        rows, flight.forward = start_all_to_all_rows(_as_received(y, plan), plan.traffic_back, plan.axis)
        return rows.detach()  # else autograd would see them change when they arrive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        flight: _InFlight = ctx.flight
        flight.backward.wait()
        rows = _arranged(flight.rows, ctx.plan)
        del flight.rows
        return rows, None, None


class _Combine(Node):
    @staticmethod
    def forward(ctx: Any, results: Tensor, weights: Tensor, plan: Plan, flight: _InFlight) -> Tensor:
        ctx.plan, ctx.flight = plan, flight
        flight.forward.wait()
        ctx.save_for_backward(results, weights)
        return _sums(results, weights.to(results.dtype), plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        results, weights = ctx.saved_tensors
        plan: Plan = ctx.plan
        rows = dy.index_select(0, plan.owners)
        dweights = torch.zeros_like(weights)
        dweights.view(-1)[plan.order] = _row_products(results, rows, weights.dtype)
        rows *= weights.to(dy.dtype).flatten()[plan.order, None]
        if plan.axis.size > 1:
            ctx.flight.rows, ctx.flight.backward = start_all_to_all_rows(rows, plan.traffic, plan.axis)
        return rows, dweights, None, None  # as many as the results that _Return has made


def _arranged(rows: Tensor, plan: Plan) -> Tensor:
    """Rows as they arrive -> one expert after the other."""
    return rows if plan.arrangement is None else rows.index_select(0, plan.arrangement)


def _as_received(rows: Tensor, plan: Plan) -> Tensor:
    """Rows one expert after the other -> as they arrived."""
    return rows if plan.arrangement is None else torch.empty_like(rows).index_copy_(0, plan.arrangement, rows)


def _sums(rows: Tensor, weights: Tensor | None, plan: Plan) -> Tensor:
    """Sums each token's rows (in the order in which they left) times its weights `[n, k]`: `[n, h]`. One pass over
    memory; 16-bit rows are added in fp32."""
    places = plan.places
    if len(rows) < places.numel():  # of a choice that was dropped: a row of zeros
        rows, places = torch.cat((rows, rows.new_zeros(1, rows.shape[1]))), places.clamp(max=len(rows))
    return F.embedding_bag(places, rows.detach(), mode="sum", per_sample_weights=weights)


def _row_products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`[m, h]` twice -> `[m]`: the inner product of each pair of rows, in dtype; on a CPU in pieces that stay in its
    cache."""
    piece = max(1, WIDENED_ELEMENTS // a.shape[1]) if a.device.type == "cpu" else max(1, len(a))
    return torch.cat([(x * y).sum(-1, dtype=dtype) for x, y in zip(a.split(piece), b.split(piece), strict=True)])
