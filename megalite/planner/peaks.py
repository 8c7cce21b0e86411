"""The points of a batch at which a rank holds the most memory, by a walk through its program."""

from collections.abc import Mapping
from functools import cache
from itertools import chain
from operator import ge
from typing import NamedTuple

from megalite.planner.activations import StageActivations
from megalite.schedule import (
    AWAITING_WEIGHT,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECOMPUTE,
    SCHEDULES,
    STEP,
    Action,
    Program,
    ScheduleShape,
)


def walked(program: Program) -> int:
    """So many micro-batches show all that a rank ever holds: three rounds through the pipeline, where not all forwards
    come first (tests/unit/planner/test_uneven.py)."""
    m = program.num_microbatches
    shape = ScheduleShape(program.num_ranks, m, program.placement.chunks_per_rank)
    if program.name not in SCHEDULES or SCHEDULES[program.name].in_flight(shape) >= m:
        return m
    period = program.num_ranks * program.placement.round
    return min(m, 3 * period + m % period)


STEPPED = -1  # that of a STEP


class MemoryPeak(NamedTuple):
    """What a rank holds after a forward, or after the I of stage `ended`, or while it steps (`STEPPED`)."""

    ended: int | None
    # (Stage, micro-batches whose backward has not begun, those whose I is done and whose W waits, and those whose
    # input is held: of a stage that recomputes, more than the first).
    counts: tuple[tuple[int, int, int, int], ...]

    def held(self, kept: Mapping[int, StageActivations]) -> tuple[float, float, float]:
        """(Activations, boundary, head) in bytes."""
        full = boundary = head = 0.0
        for stage, in_flight, waiting, inputs in self.counts:
            full += in_flight * kept[stage].full + waiting * kept[stage].weight_only
            boundary += inputs * kept[stage].boundary
            head += in_flight * kept[stage].head
        return full, boundary, head


@cache
def memory_peaks(program: Program, rank: int) -> tuple[MemoryPeak, ...]:
    """The points of a batch at which a rank holds the most, whatever a micro-batch keeps: no other point has as many
    of everything. Few, and worked out once for all that is asked of a program."""
    stages = sorted({stage for stage, _ in program.placement.stages_of(rank)})
    counts = {stage: [0, 0, 0] for stage in stages}
    fullest: dict[int | None, list[tuple[int, tuple[int, ...]]]] = {}  # ended -> (sum, all counts)
    seen: set[tuple[int | None, tuple[int, ...]]] = set()

    def note(ended: int | None) -> None:
        held = tuple(chain.from_iterable(counts.values()))
        if (ended, held) in seen:
            return
        seen.add((ended, held))
        total, others = sum(held), fullest.get(ended, [])
        # the sums decide most comparisons, and what holds as much was as a rule noted a moment ago
        if not any(more >= total and all(map(ge, other, held)) for more, other in reversed(others)):
            kept = [(less, other) for less, other in others if less > total or not all(map(ge, held, other))]
            fullest[ended] = [*kept, (total, held)]

    batches, order = 2 if program.asynchronous else 1, program.silent_order or program.order
    for index in range(batches):
        batch = program.batch(index, last=index == batches - 1, size=walked(program))
        for action in order(rank, batch):
            if action.kind == STEP:
                note(STEPPED)
            for part in sorted(action.computations(), key=lambda part: part.kind not in (FORWARD, RECOMPUTE)):
                _account(counts[part.stage], part, part.stage in program.recomputed)
                if part.kind not in (FORWARD, RECOMPUTE, BACKWARD_INPUT):
                    continue
                note(part.stage if part.kind == BACKWARD_INPUT else None)
    return tuple(
        MemoryPeak(ended, tuple(zip(stages, held[::3], held[1::3], held[2::3], strict=True)))
        for ended, moments in fullest.items()
        for _, held in moments
    )


def _account(counts: list[int], part: Action, again: bool) -> None:
    """One computation's effect on [in flight, waiting for W, inputs] of its stage. again: it recomputes."""
    kind = part.kind
    if kind in (FORWARD, RECOMPUTE):
        counts[0] += kind == RECOMPUTE or not again
        counts[2] += kind == FORWARD
    elif kind != BACKWARD_WEIGHT:
        counts[0] -= 1
        counts[2] -= 1
    counts[1] += AWAITING_WEIGHT.get(kind, 0)
