"""`CachedRows`: rows on the host, a cache of them on the device, what an update does to both, and the layer over it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from megalite.comm import (
    Axis,
    TensorShard,
    all_gather,
    all_reduce_,
    reduce_from_axis,
    scatter_sum_sequence,
    shards_of_range,
)
from megalite.gradient import Node, WeightGradQueue, sum_of_squares
from megalite.inventory import ParameterPlacement
from megalite.microbatch import Microbatch
from megalite.parallel.rows.host_rows import HostRows, Rows, Step
from megalite.parallel.rows.slots import Access, Future, Moves, Slots
from megalite.parallel.rows.staleness import StalenessCheck
from megalite.parallel.tiers import Mover

MOST_LATE = 64
"""Updates after which a row that nothing uses takes the steps that it has missed, in turn with all others: a checkpoint
would have to make up for all of them at once."""
ELSEWHERE = -1
"""In place of a row: another tensor-parallel rank has it. In place of its saved gradient: there is none."""


@dataclass
class Traffic:
    """uses: rows that forwards have read, each once a micro-batch. hits: those that were in the cache by then.
    up, down: bytes to the device, and to the host."""

    uses: int = 0
    hits: int = 0
    up: int = 0
    down: int = 0


class SavedGradients:
    """Gradients of rows that have left the cache before the end of their batch, in host memory, `[rows that have left,
    h]`. A row that comes back takes its sum so far with it."""

    def __init__(self, count: int, columns: int, dtype: torch.dtype) -> None:
        self._values = torch.empty(0, columns, dtype=dtype)
        self._place_of = np.full(count, ELSEWHERE)
        self._used = 0
        self._here = np.zeros(count, bool)

    def put(self, rows: Rows, gradient: Tensor) -> None:
        """`[n, h]`, on the host."""
        new = rows[self._place_of[rows] == ELSEWHERE]
        self._place_of[new] = np.arange(self._used, self._used + len(new))
        self._used += len(new)
        if self._used > len(self._values):
            larger = self._values.new_empty(max(self._used, 2 * len(self._values)), self._values.shape[1])
            larger[: len(self._values)] = self._values
            self._values = larger
        self._values.index_copy_(0, torch.from_numpy(self._place_of[rows]), gradient)
        self._here[rows] = True

    def of(self, rows: Rows) -> tuple[Rows, Tensor]:
        """(Those of `rows` whose gradient is here, their gradients)."""
        found = rows[self._here[rows]]
        return found, self._values.index_select(0, torch.from_numpy(self._place_of[found]))

    def leave(self, rows: Rows) -> None:
        """Their gradients are in the cache again."""
        self._here[rows] = False

    def clear(self) -> None:
        """A new batch begins."""
        self._used = 0
        self._here[:] = False
        self._place_of[:] = ELSEWHERE


class CachedRows:
    """The word embedding of one stage.

    host: all rows of this rank, of the parameter `name`.
    slots: rows of the cache. One more holds zeros, for tokens of other ranks.
    lookahead: micro-batches whose rows come before they are used.
    calls: forwards (and backwards) that make one use of a micro-batch: 2 where its halves run one by one.
    sum_over: axes of ranks with the same rows, over which gradients are summed.
    counts: whether this rank counts the gradient in the global norm.
    replica: which copy of the rows this is; copy 0 is written into checkpoints.
    """

    def __init__(
        self,
        host: HostRows,
        *,
        name: str,
        placement: ParameterPlacement,
        slots: int,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        mover: Mover,
        lookahead: int,
        calls: int = 1,
        sum_over: Sequence[Axis] = (),
        counts: bool = True,
        replica: int = 0,
    ) -> None:
        count, columns = host.weights.shape  # rows with padding
        self.host, self.name, self.placement, self.replica = host, name, placement, replica
        self.count, self.counts, self.traffic = count, counts, Traffic()
        self.weight = torch.zeros(slots + 1, columns, dtype=dtype, device=mover.device).requires_grad_()
        self.gradient = torch.zeros(slots + 1, columns, dtype=gradient_dtype, device=mover.device)
        self._mover, self._lookahead, self._calls = mover, lookahead, calls
        self._sum_over = [axis for axis in sum_over if axis.size > 1]
        self._slots, self._future = Slots(slots, count), Future(count)
        self._check, self._saved = StalenessCheck(slots, count), SavedGradients(count, columns, gradient_dtype)
        self._made = 0  # calls of the present use
        self._used = np.zeros(count, bool)  # rows with a gradient, in the cache or saved
        self._reduced: tuple[Rows, Tensor] | None = None

    def own(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens -> rows of this rank, or `ELSEWHERE`."""
        ids = tokens - self.placement.offset[0]
        return np.where((ids >= 0) & (ids < self.count), ids, ELSEWHERE)

    # ---- use ---------------------------------------------------------------------------------------------------------

    def announce(self, order: Sequence[Access], size: int, first: int, ids: Sequence[NDArray[np.int64]]) -> None:
        """A batch begins; as `Future.announce`. ids: rows of the micro-batches, each as often as it occurs."""
        self._future.announce(order, size, first, [_rows(each) for each in ids])
        self._made = 0

    @torch.no_grad()
    def forward(self, ids: NDArray[np.int64]) -> Tensor:
        """Rows `[..., h]` of a micro-batch to train on; zeros where they are `ELSEWHERE`."""
        rows = _rows(ids)
        self.traffic.uses += len(rows)
        self.traffic.hits += len(rows) - len(self._slots.missing(rows))
        self._bring(rows)
        self._check.see("read", rows)
        x = F.embedding(self._places(ids), self.weight)
        self._has_been_used()
        if self._future.forward_follows:
            self.look_ahead()
        return x

    @torch.no_grad()
    def backward(self, ids: NDArray[np.int64], dy: Tensor) -> None:
        """Adds the gradient of what `forward` has returned for them."""
        rows = _rows(ids)
        self._bring(rows)
        self._check.see("added", rows)
        self._used[rows] = True
        addend = dy.reshape(-1, dy.shape[-1]).to(self.gradient.dtype)
        self.gradient.index_add_(0, self._places(ids).flatten(), addend)
        self._has_been_used()
        self.look_ahead()  # while the device runs what has been launched
        self.host.keep_up(math.ceil(self.host.trained / (MOST_LATE * self._calls * self._future.backwards)))

    @torch.no_grad()
    def read(self, ids: NDArray[np.int64]) -> Tensor:
        """Rows `[..., h]` for a forward without a backward, past the cache: any number of them."""
        rows, place = np.unique(ids, return_inverse=True)
        own = rows[rows != ELSEWHERE]
        values = self.host.current(own).to(self.weight.dtype)
        if len(own) < len(rows):  # the lowest number
            values = torch.cat([torch.zeros_like(values[:1] if len(values) else self.weight[:1].to("cpu")), values])
        return F.embedding(self._up(torch.from_numpy(place.reshape(ids.shape))), self._up(values))

    def look_ahead(self) -> None:
        """Fetches rows of the next micro-batches, as far as those that are needed sooner leave room. Those behind the
        next update only take the steps that they have missed so far."""
        for place, rows, in_batch in self._future.ahead(self._lookahead):
            if not in_batch:
                self.host.catch_up(rows)
            elif len(self._slots.missing(rows)):
                self._move(self._slots.admit(rows, self._future.next_uses, before=place))

    def _has_been_used(self) -> None:
        self._made += 1
        if self._made == self._calls:
            self._made = 0
            self._future.advance()

    def _bring(self, rows: Rows) -> None:
        if len(self._slots.missing(rows)):
            self._move(self._slots.admit(rows, self._future.next_uses))

    @torch.no_grad()
    def _move(self, moves: Moves) -> None:
        with_gradient = self._used[moves.leaving]
        if with_gradient.any():
            slots, rows = self._up(torch.from_numpy(moves.left[with_gradient])), moves.leaving[with_gradient]
            self._saved.put(rows, self._down(self.gradient.index_select(0, slots)))
            self.gradient.index_fill_(0, slots, 0)
            self._check.see("saved", rows)
        self._check.see("left", moves.leaving[~with_gradient])
        if not len(moves.entering):
            return
        values = self.host.current(moves.entering).to(self.weight.dtype)
        self.weight.index_copy_(0, self._up(torch.from_numpy(moves.entered)), self._up(values))
        self._check.see("came", moves.entering)
        back, gradient = self._saved.of(moves.entering)
        if len(back):
            slots = self._up(torch.from_numpy(self._slots.slot_of[back]))
            self.gradient.index_copy_(0, slots, self._up(gradient))
            self._saved.leave(back)

    def _places(self, ids: NDArray[np.int64]) -> Tensor:
        """Slots, on the device."""
        own = ids != ELSEWHERE
        return self._up(torch.from_numpy(np.where(own, self._slots.slot_of[ids], self._slots.size)))

    # ---- update ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self) -> Tensor:
        """Sums the gradients of a batch over the ranks with the same rows, row by row. Returns the sum of squares of
        what this rank counts in the global norm, fp64 `[1]` on the device. Collective."""
        rows = np.flatnonzero(self._used)
        for axis in self._sum_over:
            rows = self._union(rows, axis)
        squares = torch.zeros(1, dtype=torch.float64, device=self._mover.device)
        parts = [self.gradient.new_zeros((0, self.gradient.shape[1]), device="cpu")]
        for start in range(0, len(rows), self._slots.size):
            part = self._gradient_of(rows[start : start + self._slots.size])
            for axis in self._sum_over:
                all_reduce_(part, axis)
            squares += sum_of_squares([part])
            parts.append(self._down(part))
        self._reduced = rows, torch.cat(parts)
        return squares if self.counts else torch.zeros_like(squares)

    @torch.no_grad()
    def step(
        self, *, lr: float, weight_decay: float, grad_scale: float | Tensor = 1.0, found_inf: Tensor | None = None
    ) -> None:
        """The optimizer's step with `grad_scale` x gradient, left out where `found_inf` is 1."""
        assert self._reduced is not None, "reduce comes first"
        (rows, gradient), self._reduced = self._reduced, None
        self.gradient.index_fill_(0, self._up(torch.from_numpy(self._slots.slot_of[self._cached(self._used)])), 0)
        self._used[:] = False
        self._saved.clear()
        self._future.update()
        if found_inf is not None and found_inf.to("cpu").numpy() > 0:
            self._check.see("skipped", rows)
            self.look_ahead()
            return
        gradient.mul_(grad_scale.to("cpu") if isinstance(grad_scale, Tensor) else grad_scale)
        self.host.step(rows, gradient, Step(lr, weight_decay))
        self._check.see("updated", rows)
        self._check.see("left", self._cached(np.ones(self.count, bool)))  # the step has changed every row
        self._slots.clear()
        self.look_ahead()

    def _cached(self, among: NDArray[np.bool_]) -> Rows:
        return np.flatnonzero(among & (self._slots.slot_of >= 0))

    def _gradient_of(self, rows: Rows) -> Tensor:
        """`[n, h]` on the device, this rank's sum; 0 for rows that only others have used."""
        part = self.gradient.new_zeros(len(rows), self.gradient.shape[1])
        slots = self._slots.slot_of[rows]
        here = np.flatnonzero(self._used[rows] & (slots >= 0))
        cached = self.gradient.index_select(0, self._up(torch.from_numpy(slots[here])))
        part.index_copy_(0, self._up(torch.from_numpy(here)), cached)
        saved, gradient = self._saved.of(rows)
        if len(saved):
            part.index_copy_(0, self._up(torch.from_numpy(np.searchsorted(rows, saved))), self._up(gradient))
        return part

    def _union(self, rows: Rows, axis: Axis) -> Rows:
        """Rows that any rank of the axis has used: a bit each."""
        mine = np.zeros(self.count, bool)
        mine[rows] = True
        bits = all_gather(torch.from_numpy(np.packbits(mine)).to(self._mover.device), axis).to("cpu").numpy()
        each = np.unpackbits(bits.reshape(axis.size, -1), axis=1, count=self.count)
        return np.flatnonzero(each.any(0))

    # ---- checkpoint --------------------------------------------------------------------------------------------------

    def shards(self) -> Iterator[TensorShard]:
        """Weights `<name>` and moments `optimizer/<moment>/<name>`, all rows up to date, as views to read or write."""
        self.host.settle()
        held = {"": self.host.weights, **{f"optimizer/{name}/": kept for name, kept in self.host.kept.items()}}
        for prefix, values in held.items():
            name, shape, flat = prefix + self.name, tuple(values.shape), values.view(-1)
            yield from shards_of_range(name, self.placement, shape, flat, 0, replica=self.replica)

    def after_load(self, steps: int) -> None:
        """Values were written through `shards`, of a run that has taken so many steps."""
        self.host.restart(steps)
        self._check.see("left", self._cached(np.ones(self.count, bool)))
        self._slots.clear()

    # ---- between host and device -------------------------------------------------------------------------------------

    def _up(self, values: Tensor) -> Tensor:
        """To the device, for what is launched next."""
        if values.is_floating_point():
            self.traffic.up += values.nbytes
        return self._mover.upload(values)

    def _down(self, values: Tensor) -> Tensor:
        self.traffic.down += values.nbytes
        return self._mover.download(values)


def _rows(ids: NDArray[np.int64]) -> Rows:
    rows = np.unique(ids)
    own: Rows = rows[rows != ELSEWHERE]
    return own


class HostEmbedding(nn.Module):
    """Token ids -> vectors. Each rank of the tensor axis has the rows of its part of the vocabulary; the sum over the
    axis completes the rest. It has no parameter: `CachedRows` holds, updates and saves them."""

    def __init__(self, rows: CachedRows, tp: Axis, queue: WeightGradQueue, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.rows, self.tp, self.queue, self.sequence_parallel = rows, tp, queue, sequence_parallel

    def forward(self, microbatch: Microbatch) -> Tensor:
        """-> `[s, b, h]` (`[s/t, b, h]` under sequence parallelism)."""
        host = microbatch.host_tokens
        ids = self.rows.own((microbatch.tokens.to("cpu") if host is None else host).t().numpy())
        x = _Read.apply(self.rows.weight, self.rows, ids, self.queue) if self.training else self.rows.read(ids)
        return scatter_sum_sequence(x, self.tp) if self.sequence_parallel else reduce_from_axis(x, self.tp)


class _Read(Node):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: CachedRows, ids: NDArray[np.int64], queue: WeightGradQueue) -> Tensor:
        ctx.rows, ctx.ids, ctx.queue = rows, ids, queue
        return rows.forward(ids)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        rows, ids = ctx.rows, ctx.ids
        ctx.queue.put(lambda: rows.backward(ids, dy))
        return None, None, None, None
