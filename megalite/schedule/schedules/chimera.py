"""Chimera: pipelines in both directions at once, each filling the other's bubbles (Li and Hoefler 2021,
arXiv:2107.06925).

    p=4, m=4, one pair (f=1), tF = tB; micro-batches 0, 1 run down, 2, 3 (small letters) run up
    rank 0  F0 F1 .. f2 b2 f3 b3 B0 .. B1
    rank 1  .. F0 f2 F1 f3 b2 B0 b3 B1 ..
    rank 2  .. f2 F0 f3 F1 B0 b2 B1 b3 ..
    rank 3  f2 f3 .. F0 B0 F1 B1 b2 .. b3

Rank r holds stage r of the pipeline that runs down and stage p-1-r of the one that runs up (2f stages with f pairs);
each micro-batch goes through one pipeline. The gradients of the 2f replicas of a stage are summed before the update.
Each p micro-batches form a unit, p/(2f) for each pipeline, which runs them as 1F1B: on stage s, forward j in slot s +
2j, backward j in slot 2p-1-s + 2j. Forwards of one direction and backwards of the other fill the slots of one parity
without collision, and the next unit follows 2p slots later, so a rank's list is its actions sorted by slot.

Idle (p-2f)/(2f) * (tF+tB) with tF = tB, once for all units; 2f copies of the weights; p - p/(2f) + 1 to p micro-batches
held.
"""

from collections.abc import Iterator

from megalite.schedule.action import Action, backward, forward
from megalite.schedule.definition import ScheduleShape, flush_schedule
from megalite.schedule.program import PeakActivations
from megalite.schedule.stage_placement import bidirectional


def rank_order(rank: int, shape: ScheduleShape) -> list[Action]:
    """One batch of `rank`: of every p micro-batches, the first p/(2f) go to replica 0, the next to replica 1, ..."""
    p, m, _, f = shape[:4]
    share = p // (2 * f)
    slots: list[tuple[int, Action]] = []
    for stage, replica in bidirectional(p, f).stages_of(rank):
        for unit in range(m // p):
            for turn in range(share):
                microbatch = unit * p + replica * share + turn
                begin = 2 * p * unit + 2 * turn
                slots.append((begin + stage, forward(stage, microbatch, replica=replica)))
                slots.append((begin + 2 * p - 1 - stage, backward(stage, microbatch, replica=replica)))
    return [action for _, action in sorted(slots)]


def peak(rank: int, shape: ScheduleShape) -> PeakActivations:
    """Least at the ends of a pipeline pair, most in its middle."""
    p, _, _, f = shape[:4]
    within, length = rank % (p // f), p // f
    return PeakActivations(p - p // (2 * f) + 1 + min(within, length - 1 - within))


def problems(shape: ScheduleShape, name: str = "chimera", units: int = 1) -> Iterator[str]:
    """units: of p micro-batches, that a batch consists of a multiple of."""
    p, m, _, f = shape[:4]
    if p % (2 * f):
        yield (
            f"`pipeline_schedule`={name}: p = {p} ranks cannot hold {2 * f} opposite pipelines (p must be a multiple "
            f"of 2f = {2 * f}); change `pipeline_model_parallel_size`, or use `pipeline_schedule`=1f1b"
        )
    if m % (units * p):
        unit = f"p = {p} ranks" if units == 1 else f"{units}p = {units * p} for p = {p} ranks"
        yield (
            f"`pipeline_schedule`={name}: m = {m} micro-batches per batch is not a multiple of {unit}, the "
            f"unit that its two directions share; change `global_batch_size`, or use `pipeline_schedule`=1f1b"
        )


SCHEDULE = flush_schedule(
    "chimera",
    "Chimera: f pairs of opposite pipelines, 2f copies of the weights",
    "Li and Hoefler 2021, arXiv:2107.06925",
    lambda shape: bidirectional(shape.p, shape.f),
    rank_order,
    peak,
    problems,
    paired=True,
    idle=lambda f, i, w, v: (f + i + w) / 2,
    in_flight=lambda shape: min(shape.m, shape.p / 2 + 1),
)
