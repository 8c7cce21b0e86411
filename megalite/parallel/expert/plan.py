"""Tokens on their way to their experts and back.

    choices (token, expert), k a token     sorted by expert, dropped ones left out
    over ep     a message of counts, one of rows; what arrives is sorted by local expert, and by rank
    back        the same way; the k results of a token are added up in the order of its choices

Rows are copied to where one row goes, never added at random: results do not depend on the order of arrival, and a
token's sum has the same order of additions at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.comm import Axis, Done, Handle, all_gather, conjugates, start_all_to_all_rows
from megalite.gradient import WIDENED_ELEMENTS, Node
from megalite.late_reading import LateReading


class RowCounts:
    """Rows of a rank's experts, one expert after the other.

    table: int64 `[ep, ep, E]`, rows from one rank to another's experts. rank: this one.
    reading: of the table, on its way to the host. rows: of all experts.
    """

    def __init__(self, table: Tensor, rank: int, reading: LateReading, rows: int) -> None:
        self._arriving, self._rank, self._reading, self._rows = table[:, rank], rank, reading, rows

    @cached_property
    def on_device(self) -> Tensor:
        """The counts, int64 `[E]`."""
        return self._arriving.sum(0) if len(self._arriving) > 1 else self._arriving[0]

    @cached_property
    def ends(self) -> Tensor:
        """Where each expert's rows end, int32 `[E]`, on the device."""
        return self.on_device.cumsum(0, dtype=torch.int32)

    @cached_property
    def experts(self) -> Tensor:
        """The expert of each row, int64 `[rows]`, on the device, until `forget_experts`."""
        return torch.repeat_interleave(self.on_device, output_size=self._rows)

    def forget_experts(self) -> None:
        """Backward needs none: memory that graphs would keep."""
        vars(self).pop("experts", None)

    @cached_property
    def on_host(self) -> tuple[int, ...]:
        """The counts. Waits for their copy, which was started before the rows were sent."""
        return tuple(map(sum, zip(*(row[self._rank] for row in self._reading.read()), strict=True)))

    @cached_property
    def together(self) -> RowCounts:
        """The rows as those of one matrix that all experts share."""
        return _Together(self)


class _Together(RowCounts):
    def __init__(self, apart: RowCounts) -> None:
        self.on_device, self.ends = apart.on_device.sum(0, keepdim=True), apart.ends[-1:]
        self.on_host = (sum(apart.on_host),)
        self._rows = apart._rows


@dataclass(frozen=True)
class Plan:
    """Dispatch plan of one layer and micro-batch.

    order: int64 `[m]`, which of the n * k choices each row is that leaves this rank.
    owners: int64 `[m]`, the token of each row.
    places: int64 `[n, k]`, the row of each choice; of one that was dropped a number behind all rows.
    traffic[i][j]: rows from rank i of the axis to rank j.
    arrangement: int64, which received row comes first, second ...; None: they stay in their order.
    counts: rows of this rank's experts.
    """

    order: Tensor
    owners: Tensor
    places: Tensor
    traffic: tuple[tuple[int, ...], ...]
    arrangement: Tensor | None
    counts: RowCounts
    axis: Axis


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
    # [ep, ep, E/ep]: small, and a rank knows what the others send each other
    everyone = all_gather(counts.view(1, axis.size, -1), axis)
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
        order=order,
        owners=order // experts.shape[1],
        places=places.view_as(experts),
        traffic=tuple(map(tuple, traffic)),
        arrangement=arrangement,
        counts=RowCounts(everyone, axis.rank, reading, arrived),
        axis=axis,
    )


Sent = tuple[tuple[Tensor, ...], Handle]
"""Tensors that arrive, and the handle that tells when."""


class Leg:
    """A message of the forward and that of its gradients, one of them in flight at a time."""

    _arriving: tuple[Tensor, ...] = ()
    _handle: Handle = Done()

    def __init__(self, forward: Callable[..., Sent], backward: Callable[..., Sent]) -> None:
        self.forward, self.backward = forward, backward

    def begin(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Starts the message; returns what stands for it in autograd's graph until it is waited for."""
        return tuple(_Begin.apply(self, *given))

    def end(self, *begun: Tensor) -> tuple[Tensor, ...]:
        """What has arrived, once it has. begun: as `begin` returned it."""
        return tuple(_End.apply(self, *begun))

    def start(self, send: Callable[..., Sent], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns memory in which something is to arrive."""
        self._arriving, self._handle = send(*(x.contiguous() for x in given))
        return self._arriving

    def finish(self) -> tuple[Tensor, ...]:
        """Returns what has arrived."""
        self._handle.wait()
        arrived, self._arriving, self._handle = self._arriving, (), Done()
        return arrived


class _Begin(Node):
    @staticmethod
    def forward(ctx: Any, leg: Leg, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.leg = leg
        leg.start(leg.forward, given)
        return tuple(x.new_empty(()).expand_as(x) for x in given)  # the shapes of their gradients, which _End returns

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.leg.finish()


class _End(Node):
    @staticmethod
    def forward(ctx: Any, leg: Leg, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.leg = leg
        return leg.finish()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.leg.start(ctx.leg.backward, gradients)


class Dispatched:
    """Tokens `[n, h]` on their way to their experts, then the results on their way back. Other work may be done until
    they are waited for, and in backward until their gradients are.

    Backward runs what came later in forward first: what is computed in between hides both messages.
    rows: stands for what travels in autograd's graph until it is waited for. counts: rows of this rank's experts.
    """

    def __init__(self, x: Tensor, plan: Plan) -> None:
        self._plan, self.counts = plan, plan.counts
        self.rows = conjugates(x, plan, _leaving, _sums)
        if plan.axis.size > 1:
            self._leg = _leg(plan, back=False)
            (self.rows,) = self._leg.begin(self.rows)

    def wait(self) -> Tensor:
        """Rows of this rank's experts, one expert after the other, `[sum(counts), h]`."""
        if self._plan.axis.size == 1:
            return self.rows
        (rows,) = self._leg.end(self.rows)
        return conjugates(rows, self._plan, _arranged, _as_received)

    def back(self, y: Tensor) -> Dispatched:
        """Starts the experts' results `[sum(counts), h]`, in the order in which their rows came, on their way back."""
        self.rows = y
        if self._plan.axis.size > 1:
            self._leg = _leg(self._plan, back=True)
            (self.rows,) = self._leg.begin(conjugates(y, self._plan, _as_received, _arranged))
        return self

    def combine(self, weights: Tensor) -> Tensor:
        """The sum of each token's results times its `weights` `[n, k]`: `[n, h]`."""
        results = self.rows
        if self._plan.axis.size > 1:
            (results,) = self._leg.end(results)
        return _Combine.apply(results, weights, self._plan)


def _leg(plan: Plan, *, back: bool) -> Leg:
    ways = [plan.traffic, tuple(zip(*plan.traffic, strict=True))]
    return Leg(*(partial(_send, plan.axis, traffic) for traffic in (reversed(ways) if back else ways)))


def _send(axis: Axis, traffic: Sequence[Sequence[int]], rows: Tensor) -> Sent:
    arriving, handle = start_all_to_all_rows(rows, traffic, axis)
    return (arriving,), handle


class _Combine(Node):
    @staticmethod
    def forward(ctx: Any, results: Tensor, weights: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(results, weights)
        return _sums(results, plan, weights.to(results.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        results, weights = ctx.saved_tensors
        plan: Plan = ctx.plan
        rows = _leaving(dy, plan)
        dweights = torch.zeros_like(weights)
        on_cpu = rows.device.type == "cpu"  # in pieces that stay in its cache
        piece = max(1, WIDENED_ELEMENTS // rows.shape[1] if on_cpu else len(rows))
        pairs = zip(results.split(piece), rows.split(piece), strict=True)
        dweights.view(-1)[plan.order] = torch.cat([(x * y).sum(-1, dtype=weights.dtype) for x, y in pairs])
        rows *= weights.to(dy.dtype).flatten()[plan.order, None]
        return rows, dweights, None


def _leaving(x: Tensor, plan: Plan) -> Tensor:
    """`[n, h]` -> the rows that leave, one for each choice."""
    return x.index_select(0, plan.owners)


def _arranged(rows: Tensor, plan: Plan) -> Tensor:
    """Rows as they arrive -> one expert after the other."""
    return rows if plan.arrangement is None else rows.index_select(0, plan.arrangement)


def _as_received(rows: Tensor, plan: Plan) -> Tensor:
    """Rows one expert after the other -> as they arrived."""
    return rows if plan.arrangement is None else torch.empty_like(rows).index_copy_(0, plan.arrangement, rows)


def _sums(rows: Tensor, plan: Plan, weights: Tensor | None = None) -> Tensor:
    """Sums each token's rows (in the order in which they left) times its weights `[n, k]`: `[n, h]`. One pass over
    memory; 16-bit rows are added in fp32."""
    places = plan.places
    if len(rows) < places.numel():  # of a choice that was dropped: a row of zeros
        rows, places = torch.cat((rows, rows.new_zeros(1, rows.shape[1]))), places.clamp(max=len(rows))
    return F.embedding_bag(places, rows.detach(), mode="sum", per_sample_weights=weights)
