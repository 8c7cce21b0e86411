"""Simulator: what a program costs, given the time of each computation and of a message.

Every rank runs its list in order. A computation starts when the rank is free and its inputs are there: the local ones
when the computation that made them ends, those of another rank one hop time later. Messages never block a sender.
REDUCE, STEP and weight gathers take no time unless a cost is given: the simulator prices the order, not the machine.

Times are those of one micro-batch through all layers of a rank; a chunk of v takes 1/v of it, so that numbers of
different schedules can be compared. Costs given as int or Fraction give exact results.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from math import lcm
from typing import NamedTuple

from megalite.errors import ScheduleError
from megalite.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    OVERLAP,
    RECOMPUTE,
    STEP,
    Action,
)
from megalite.schedule.arrival import as_arrives
from megalite.schedule.chunks import ChunkUse, plan_chunks, sizes_of
from megalite.schedule.links import TRANSFER_KINDS, Links
from megalite.schedule.memory import live_versions, peak_activations
from megalite.schedule.program import BatchSpec, Program
from megalite.schedule.stage_placement import StagePlacement

Time = Fraction | float


class Span(NamedTuple):
    """An action of a rank from start to end: simulated, or measured in a real run."""

    rank: int
    action: Action
    start: Time
    end: Time


@dataclass(frozen=True)
class Costs:
    """Times, in any unit. tR, to run a forward again, is tF. Kinds other than F, R, B, I and W take no time unless
    `exact` gives it, which overrides everything else."""

    forward: Time = Fraction(1)  # tF, of a whole rank
    backward_input: Time = Fraction(1)  # tI
    backward_weight: Time = Fraction(1)  # tW
    communication: Time = Fraction(0)  # tC, one hop of an activation
    transfer: Time = Fraction(0)  # what one chunk's activations take to or from the host
    host_byte: Time = Fraction(0)  # what a byte of weights takes
    exact: Mapping[tuple[int, str], Time] = field(default_factory=dict)  # (stage, kind) -> time of that chunk
    overlap: Time = Fraction(1)  # time of an OVERLAP as a fraction of the sum of its parts (1: no gain)

    def of(self, action: Action, program: Program) -> Time:
        """Time of one action."""
        if action.kind == OVERLAP:
            return self.overlap * sum((self.of(part, program) for part in action.parts), Fraction(0))
        if (action.stage, action.kind) in self.exact:
            return self.exact[action.stage, action.kind]
        if action.kind == BACKWARD:
            halves = (action._replace(kind=kind) for kind in (BACKWARD_INPUT, BACKWARD_WEIGHT))
            return sum((self.of(half, program) for half in halves), Fraction(0))
        base = {FORWARD: self.forward, BACKWARD_INPUT: self.backward_input, BACKWARD_WEIGHT: self.backward_weight}
        base |= {RECOMPUTE: self.forward} | dict.fromkeys(TRANSFER_KINDS, self.transfer)
        return base.get(action.kind, Fraction(0)) * program.activation_unit


@dataclass(frozen=True)
class Timeline:
    """What happened when, simulated or measured: spans in order of start, and the figures people compare."""

    num_ranks: int
    spans: tuple[Span, ...]
    title: str = ""
    batch_starts: tuple[int, ...] = (0,)  # first micro-batch of each batch
    peak_activations_per_rank: tuple[Time, ...] = ()  # in micro-batches through a whole rank
    weight_versions_per_rank: tuple[int, ...] = ()  # alive at once
    unit: str = ""  # of the times: empty if no time was measured, else "ms"
    transfers: tuple[Span, ...] = ()  # EVICT and PREFETCH, which run beside the spans
    division: str = ""  # which rank holds which layers, in words

    @classmethod
    def measured(
        cls, spans: Iterable[tuple[int, Action, float, float]], *, title: str = "", batch_starts: Sequence[int] = (0,)
    ) -> Timeline:
        """A real run as (rank, action, start, end) in seconds of one clock; time 0 is the first start, the unit ms."""
        rows = sorted((Span(*span) for span in spans), key=lambda span: (span.start, span.rank, span.end))
        begin = rows[0].start if rows else 0.0
        shifted = (
            span._replace(start=float(span.start - begin) * 1e3, end=float(span.end - begin) * 1e3) for span in rows
        )
        ranks = 1 + max((span.rank for span in rows), default=0)
        return cls(ranks, tuple(shifted), title, tuple(batch_starts), unit="ms")

    @cached_property
    def num_chunks(self) -> int:
        """Chunks per rank, by the highest stage that occurs."""
        stages = (part.stage for span in self.spans for part in span.action.computations())
        return max(stages, default=0) // self.num_ranks + 1

    @cached_property
    def makespan(self) -> Time:
        return max((span.end for span in self.spans), default=Fraction(0))

    @property
    def busy_per_rank(self) -> tuple[Time, ...]:
        busy: list[Time] = [Fraction(0)] * self.num_ranks
        for span in self.spans:
            busy[span.rank] += span.end - span.start
        return tuple(busy)

    @property
    def idle_per_rank(self) -> tuple[Time, ...]:
        """Makespan minus work."""
        makespan = self.makespan
        return tuple(makespan - busy for busy in self.busy_per_rank)

    @property
    def idle_inside_per_rank(self) -> tuple[Time, ...]:
        """Gaps between a rank's first and last action."""
        inside: list[Time] = []
        for rank, busy in enumerate(self.busy_per_rank):
            own = [span for span in self.spans if span.rank == rank and span.end > span.start]
            inside.append(max(s.end for s in own) - min(s.start for s in own) - busy if own else Fraction(0))
        return tuple(inside)

    @property
    def bubble_over_ideal(self) -> Time:
        """Idle over work: (p-1)/m for GPipe and 1F1B."""
        busy = sum(self.busy_per_rank, Fraction(0))
        return sum(self.idle_per_rank, Fraction(0)) / busy if busy else Fraction(0)

    @property
    def bubble_over_total(self) -> Time:
        """Idle over makespan: (p-1)/(m+p-1) for GPipe and 1F1B."""
        total = self.makespan * self.num_ranks
        return sum(self.idle_per_rank, Fraction(0)) / total if total else Fraction(0)


def simulate(
    program: Program,
    costs: Costs | None = None,
    *,
    batches: BatchSpec = 1,
    global_norm: bool = False,
) -> Timeline:
    """Run the program on paper.

    batches: how many, or which (see `BatchSpec`).
    global_norm: a STEP waits until the gradients of its update are complete on all ranks, as exact clipping asks for;
    matters from the second batch on (ignored where every micro-batch is an update).
    Raises ScheduleError if the lists wait for each other in a circle.
    """
    costs = costs or Costs()
    lists = program.unroll(batches)
    times = _Times(program, costs, lists)
    if program.max_in_flight:
        program = as_arrives(program, times.of, times.communication, batches)
        lists = program.unroll(batches)
    norms = _Norms(program, batches) if global_norm and not program.update_per_microbatch else None
    links = Links()
    reads = _weights_read(program, batches) if program.chunks is not None else ()
    spans = times.given_back(_run(program, lists, times, norms, links, reads))
    transfers = times.given_back(sorted(links.spans, key=lambda span: (span[2], span[0])))
    unit = program.activation_unit
    return Timeline(
        program.num_ranks,
        tuple(spans),
        program.name,
        tuple(batch.start for batch in program.batches(batches)),
        () if program.rounds else tuple(peak_activations(actions) * unit for actions in lists),
        tuple(live_versions(actions) for actions in lists),
        transfers=tuple(transfers),
    )


ResultKey = tuple[str, int, int, int]
"""A result: (F, R, I or W, stage, replica, micro-batch); (STEP, 0, 0, update) is the norm of an update's gradient."""


def dependencies(action: Action, placement: StagePlacement) -> Iterable[tuple[int, ResultKey]]:
    """(rank, key) of the computations whose results `action` needs."""
    own = set(produced(action)) if action.kind == OVERLAP else ()
    for part in action.computations():
        stage, replica, k = part.stage, part.replica, part.microbatch
        if part.kind == FORWARD:
            needs = [(FORWARD, stage - 1)] if stage else []
        elif part.kind in (BACKWARD_WEIGHT, RECOMPUTE):
            needs = [(BACKWARD_INPUT if part.kind == BACKWARD_WEIGHT else FORWARD, stage)]
        else:
            needs = [(FORWARD, stage)] + [(BACKWARD_INPUT, stage + 1)] * (stage + 1 < placement.num_stages)
        for kind, at in needs:
            key = (kind, at, replica, k)
            if key not in own:
                yield placement.rank_of(at, replica, k), key


def produced(action: Action) -> list[ResultKey]:
    """Keys of the results of a computation; a whole backward gives what I and W give."""
    keys: list[ResultKey] = []
    for part in action.computations():
        kinds = (BACKWARD_INPUT, BACKWARD_WEIGHT) if part.kind == BACKWARD else (part.kind,)
        keys += [(kind, part.stage, part.replica, part.microbatch) for kind in kinds]
    return keys


class _Norms:
    """When the gradient of each update is complete on all ranks."""

    def __init__(self, program: Program, batches: BatchSpec) -> None:
        self.run = program.batches(batches)
        self.remaining = [batch.size * program.num_stages for batch in self.run]
        self.latest: list[Time] = [Fraction(0)] * len(self.run)

    def add(self, key: ResultKey, end: Time) -> Iterable[tuple[ResultKey, Time]]:
        """Count a finished computation; the norm that it completes, if any, and when."""
        kind, _, _, microbatch = key
        if kind == BACKWARD_WEIGHT:
            update = next(batch.iteration for batch in self.run if microbatch < batch.end)
            self.remaining[update] -= 1
            self.latest[update] = max(self.latest[update], end)
            if self.remaining[update] == 0:
                yield (STEP, 0, 0, update), self.latest[update]


Reads = Mapping[int, Sequence[ChunkUse]]
"""Place in a rank's list -> the layers whose weights the action there reads, and what comes and goes with them."""


def _weights_read(program: Program, batches: BatchSpec) -> list[Reads]:
    """Of every rank: each batch begins with nothing on the device, since its weights are new."""
    found: list[Reads] = []
    for rank in range(program.num_ranks):
        places: dict[int, list[ChunkUse]] = {}
        begin = 0
        for batch in program.batches(batches):
            actions = program.order(rank, batch)
            for use in plan_chunks(program, rank, actions):
                places.setdefault(begin + use.action, []).append(use)
            begin += len(actions)
        found.append(places)
    return found


class _Times:
    """What the simulation counts in. Exact times are multiples of a common unit, and are counted in it: integers are
    compared and added in a tenth of the time of fractions. Floating-point numbers stay as they are.

    zero, communication, host_byte: no time, and two of `Costs`, in the unit.
    """

    def __init__(self, program: Program, costs: Costs, lists: Sequence[Sequence[Action]]) -> None:
        kinds = {_costs_alike(action): action for actions in lists for action in actions}
        self._takes = {alike: costs.of(action, program) for alike, action in kinds.items()}
        self.communication, self.host_byte = costs.communication, costs.host_byte
        times = [*self._takes.values(), costs.communication]
        # Layer by layer a computation is divided again, by any number of layers: those times stay fractions.
        exact = program.chunks is None and all(isinstance(time, int | Fraction) for time in times)
        self._unit = Fraction(1, lcm(*(Fraction(time).denominator for time in times))) if exact else None
        self.zero: Time = Fraction(0) if self._unit is None else 0
        if self._unit is not None:
            self._takes = {alike: int(time / self._unit) for alike, time in self._takes.items()}
            self.communication = int(self.communication / self._unit)

    def of(self, action: Action) -> Time:
        """What the action takes."""
        return self._takes[_costs_alike(action)]

    def given_back(self, spans: Iterable[tuple[int, Action, Time, Time]]) -> Iterator[Span]:
        """The spans in the unit of the costs."""
        if self._unit is None:
            return (Span(*span) for span in spans)
        exact = cache(lambda count: count * self._unit)
        return (Span(rank, action, exact(start), exact(end)) for rank, action, start, end in spans)


def _costs_alike(action: Action) -> Hashable:
    """Actions for which this is the same take the same time."""
    return action.kind, action.stage, tuple((part.kind, part.stage) for part in action.parts) if action.parts else ()


def _run(
    program: Program,
    lists: Sequence[Sequence[Action]],
    times: _Times,
    norms: _Norms | None,
    links: Links,
    reads: Sequence[Reads],
) -> list[Span]:
    done: dict[ResultKey, Time] = {}
    clock: list[Time] = [times.zero] * program.num_ranks
    position = [0] * program.num_ranks
    waiting: dict[ResultKey, list[int]] = {}
    ready = list(range(program.num_ranks))
    spans: list[Span] = []
    sizes = sizes_of(program.chunks, program.placement.num_replicas) if program.chunks is not None else {}
    while ready:
        rank = ready.pop()
        while position[rank] < len(lists[rank]):
            action = lists[rank][position[rank]]
            start = clock[rank]
            missing = None
            needs = dependencies(action, program.placement)
            if action.kind == STEP and norms is not None:
                needs = [(rank if program.num_ranks == 1 else -1, (STEP, 0, 0, action.microbatch))]
            for source, key in needs:
                if key not in done:
                    missing = key
                    break
                start = max(start, done[key] + (times.communication if source != rank else 0))
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            if action.kind in TRANSFER_KINDS:
                links.start(rank, action, start, times.of(action))
                position[rank] += 1
                continue
            if action.is_compute:
                start = links.ready(rank, action, start)
            takes = times.of(action)
            clock[rank] = start + takes
            if reads and action.is_compute:
                clock[rank] = links.read(
                    rank, reads[rank].get(position[rank], ()), sizes, (start, takes), times.host_byte
                )
            if action.is_compute or action.kind == STEP or clock[rank] > start:
                spans.append(Span(rank, action, start, clock[rank]))
            position[rank] += 1
            for key in produced(action):
                done[key] = clock[rank]
                ready += waiting.pop(key, [])
                for norm, end in norms.add(key, clock[rank]) if norms is not None else ():
                    done[norm] = end
                    ready += waiting.pop(norm, [])
    if stuck := [rank for rank in range(program.num_ranks) if position[rank] < len(lists[rank])]:
        places = ", ".join(f"rank {rank} at {lists[rank][position[rank]]}" for rank in stuck)
        raise ScheduleError(f"schedule {program.name}: the ranks wait for each other: {places}")
    spans.sort(key=lambda span: (span.start, span.rank, span.end))
    return spans
