"""Program: a pipeline schedule as a value, which is proved by one validator, priced by one simulator, drawn by one
renderer and run by one executor.

A program gives the actions of one rank for one training iteration ("batch") at a time:

    program.actions_for_batch(rank, program.batch(t, last=...))     # the list that the rank executes in iteration t

The concatenation of these lists over t is the whole run of the rank. A flush schedule has the same list in every
iteration, only with larger ids. An asynchronous schedule (PipeDream, PipeDream-2BW) never drains: its iteration t ends
with STEP t, and by then the rank has already begun batch t + 1:

    rank 1 of 2BW, p=2, m=2     | batch 0 (cold)                      | batch 1             | batch 2 (last)     |
                                | F0 B0 F1 B1 F2 B2 F3 B3 STEP0       | F4 B4 F5 B5 STEP1   | STEP2              |

So the caller needs the micro-batches of batch t + 1 during iteration t, and must know *before* iteration t whether
there will be a batch t + 1. With `last=True` nothing of it is begun and the pipeline drains, so that no message is left
unmatched. The iteration after that (of a resumed run, or after an evaluation) is `first=True`: nothing is in flight,
and it begins with the warm-up. Which version a micro-batch uses does not depend on where the run was interrupted, so a
resumed run computes what an uninterrupted one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

from megalite.schedule.action import OVERLAP, Action, step
from megalite.schedule.stage_placement import StagePlacement
from megalite.schedule.template import Template


class ActivationRoom(NamedTuple):
    """In any unit of memory."""

    full: tuple[float, ...]  # stage -> what a micro-batch's forward keeps for its backward
    weight_only: tuple[float, ...]  # stage -> what is left of it between I and W
    capacity: tuple[float, ...]  # rank -> the most of both that it may hold while it computes


class WeightChunks(NamedTuple):
    """Weights that live on the host and are on the device while they are used, a layer at a time. In bytes."""

    sizes: tuple[tuple[int, ...], ...]  # stage -> its layers' weights
    forward: tuple[tuple[tuple[int, ...], ...], ...]  # stage -> the layers, usually one, that each step of F or R reads
    backward: tuple[tuple[tuple[int, ...], ...], ...]  # and of a B or I
    gradients: tuple[tuple[int, int], ...]  # stage -> what a backward sends to the host, and fetches from there
    capacity: tuple[int, ...] | None = None  # rank -> most weights held; None: the layer in use and the next one


class Rounds(NamedTuple):
    """A program of forwards alone (`decode.py`): in round t stage s stands as stage t * S + s. The first `groups`
    micro-batches go through all rounds, the others through the first."""

    number: int
    groups: int


class BatchRange(NamedTuple):
    """One iteration as the schedule sees it."""

    iteration: int  # t, counted over the run
    start: int  # global id of its first micro-batch
    size: int  # m_t, its number of micro-batches
    next_size: int  # m of batch t + 1, 0 if the pipeline drains with this batch
    first: bool  # nothing is in flight when it begins

    @property
    def end(self) -> int:
        """Global id after its last micro-batch: the first one of batch t + 1."""
        return self.start + self.size

    @property
    def following(self) -> BatchRange:
        """Batch t + 1 of a run that continues."""
        return BatchRange(self.iteration + 1, self.end, self.next_size, self.next_size, first=False)


class PeakActivations(NamedTuple):
    """The most activations that a rank holds at once, counted in chunks (those of one micro-batch in one chunk are 1).

    An upper bound: if they take M_B and M_W bytes each (0 <= M_W <= M_B), a rank never holds more than
    `full * M_B + weight_only * M_W` bytes of activations.
    """

    full: int  # of micro-batches whose backward has not begun
    weight_only: int = 0  # what is still held between I and W, which is less each


BatchSpec = int | Sequence[int] | Sequence[BatchRange]
"""How long to run: a number of batches, the number of micro-batches of each, or batches (with drains in between)."""

RankActions = Callable[[int, BatchRange], list[Action]]
"""(rank, batch) -> the rank's actions of this iteration, with global micro-batch ids and weight versions. Two batches
of one shape have the same list but for the numbers (see `Template`); a flush program looks at the size alone."""


@dataclass(frozen=True)
class Program:
    """A schedule for p ranks. Pure data and pure functions: no ranks, tensors or processes are needed to build it."""

    name: str  # of the schedule
    placement: StagePlacement  # which rank holds which stage
    num_microbatches: int  # m, the default size of `batch()`
    order: RankActions
    weight_versions: tuple[int, ...]  # per rank, versions of a stage's weights that are kept at once
    peak_activations: tuple[PeakActivations, ...]  # per rank, for a batch of num_microbatches
    staleness: tuple[int, ...]  # per stage, how many updates old the weights of a gradient are when it is applied
    asynchronous: bool = False  # iteration t begins batch t + 1
    # PipeDream's update per micro-batch, or per round of them where workers take turns (`StagePlacement.round`).
    update_per_microbatch: bool = False
    consistent: bool = True  # F and B of a micro-batch use the same weight version on every stage
    gradient_buffers: int = 1  # updates whose gradients are accumulated at once
    has_communication: bool = False  # SEND and RECV have been inserted
    rounds: Rounds | None = None  # of a program without backwards
    recomputed: frozenset[int] = frozenset()  # stages whose forward keeps its input alone; R makes the rest again
    room: ActivationRoom | None = None  # what EVICT and PREFETCH keep to, where activations wait on the host
    chunks: WeightChunks | None = None  # weights that come and go layer by layer (`chunks.plan_chunks`)
    max_in_flight: int = 0  # micro-batches at once where ranks run what has arrived (`arrival.py`); else 0
    silent_order: RankActions | None = None  # without the messages of a pass, for who asks of memory alone
    _templates: dict[tuple[int, int, int, bool], Template] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def keeps_gradients(self) -> bool:
        """Whether a gradient exists while some micro-batch runs forward, so that its memory is needed throughout."""
        return self.num_microbatches > 1 or self.asynchronous

    @property
    def activation_unit(self) -> Fraction:
        """One chunk in units of "one micro-batch through all layers of one rank": 1/v."""
        if self.placement.workers:
            return Fraction(1)
        return Fraction(self.num_ranks * (self.rounds.number if self.rounds else 1), self.num_stages)

    def batch(
        self,
        iteration: int,
        *,
        first: bool | None = None,
        last: bool = False,
        start: int | None = None,
        size: int | None = None,
    ) -> BatchRange:
        """Iteration t. Without `start` (micro-batches before it) and `size` every batch has num_microbatches; first
        defaults to t == 0."""
        size = self.num_microbatches if size is None else size
        start, first = iteration * size if start is None else start, iteration == 0 if first is None else first
        return BatchRange(iteration, start, size, 0 if last else size, first)

    def batches(self, run: BatchSpec) -> tuple[BatchRange, ...]:
        """A whole run: the number of batches, the number of micro-batches of each, or the batches themselves."""
        if isinstance(run, int):
            run = [self.num_microbatches] * run
        if any(isinstance(item, BatchRange) for item in run):
            return tuple(item for item in run if isinstance(item, BatchRange))
        sizes = [item for item in run if isinstance(item, int)]
        following = [*sizes[1:], 0]
        return tuple(BatchRange(t, sum(sizes[:t]), size, following[t], first=t == 0) for t, size in enumerate(sizes))

    def actions_for_batch(self, rank: int, batch: BatchRange) -> list[Action]:
        """What `rank` does in this iteration, in order. Generated once per shape of a batch."""
        shape = (rank, batch.size, batch.next_size, batch.first) if self.asynchronous else (rank, batch.size, 0, False)
        template = self._templates.get(shape)
        if template is None:
            late = self.num_stages + 1  # so late in the run that none of its actions uses the initial weights
            start, together = late * self.placement.round, self.placement.round if self.update_per_microbatch else None
            actions = self.order(rank, BatchRange(late, start, *shape[1:]))
            template = Template(actions, start, late, together=together)
            self._templates[shape] = template
        return template.at(batch.start, batch.iteration)

    def unroll(self, run: BatchSpec) -> tuple[tuple[Action, ...], ...]:
        """The whole run of every rank (see `batches`), each batch as `order` writes it: what is proved and drawn."""
        batches = self.batches(run)
        return tuple(
            tuple(action for batch in batches for action in self.order(rank, batch)) for rank in range(self.num_ranks)
        )

    def update_of(self, microbatch: int, batch: BatchRange) -> int:
        """Number of the optimizer update that takes the gradient of `microbatch`, seen from iteration `batch`."""
        if self.update_per_microbatch:
            return microbatch // self.placement.round
        return batch.iteration if microbatch < batch.end else batch.iteration + 1

    def with_order(self, order: RankActions) -> Program:
        """The same program with a lowered order: what a pass returns."""
        return replace(self, order=order, silent_order=None)


def shift(action: Action, batch: BatchRange) -> Action:
    """A computation with a local id of one batch (micro-batches 0 .. m-1) -> the global id and the batch's version."""
    if action.kind == OVERLAP:
        parts = tuple(shift(part, batch) for part in action.parts)
        return action._replace(microbatch=parts[0].microbatch, parts=parts)
    return action._replace(microbatch=action.microbatch + batch.start, version=batch.iteration)


def flush_program(
    name: str,
    placement: StagePlacement,
    num_microbatches: int,
    rank_order: Callable[[int, int], Iterable[Action]],
    peak: Callable[[int, int], PeakActivations],
) -> Program:
    """A synchronous schedule: every batch ends with an empty pipeline and one STEP per stage; one weight version.

    rank_order(rank, m): the computations of one batch with local ids. peak(rank, m): its declared activations. Where
    ranks take turns, m and ids are those of one rank's own micro-batches.
    """

    def order(rank: int, batch: BatchRange) -> list[Action]:
        turn, turns = placement.turn_of(rank)
        own = rank_order(rank, batch.size // turns)
        if turns > 1:
            own = (action._replace(microbatch=action.microbatch * turns + turn) for action in own)
        actions = [shift(action, batch) for action in own]
        return actions + [step(stage, batch.iteration, replica=replica) for stage, replica in placement.stages_of(rank)]

    return Program(
        name=name,
        placement=placement,
        num_microbatches=num_microbatches,
        order=order,
        weight_versions=(1,) * placement.num_ranks,
        peak_activations=tuple(
            peak(rank, num_microbatches // placement.turn_of(rank)[1]) for rank in range(placement.num_ranks)
        ),
        staleness=(0,) * placement.num_stages,
    )
