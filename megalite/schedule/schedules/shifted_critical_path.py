"""Shifted critical path: 1F1B whose recomputation does not wait for the gradient (Lai et al. 2022, Merak,
arXiv:2206.04959).

    p=3, m=3 (R: the forward again, from the stage's saved input)
    rank 0  F0 F1 F2 R0 .. .. .. B0-B0 R1 B1-B1 R2 B2-B2
    rank 1  .. F0 F1 F2 R0 B0-B0 R1 B1-B1 R2 B2-B2 .. ..
    rank 2  .. .. F0 B0-B0 F1 B1-B1 F2 B2-B2 .. .. .. ..

1F1B with full recomputation runs a forward again in front of every backward, on every stage, and the last one, which
all others wait for, sets the pace: (m+p-1)(tF+tR+tB). The last stage runs a micro-batch's backward right behind its
forward and has nothing to recompute. Without it the last but one is the busiest: it should begin first and never wait.
So every other stage has one more forward in flight than in 1F1B, and recomputes before the gradient arrives (what that
saves: docs/schedules.md). Rank r keeps the inputs of min(m, p-r+1) micro-batches and all activations of one.
"""

from collections.abc import Iterator

from megalite.schedule.action import BACKWARD, Action, recompute
from megalite.schedule.definition import ScheduleShape, flush_schedule
from megalite.schedule.program import PeakActivations
from megalite.schedule.schedules.one_f_one_b import one_f_one_b
from megalite.schedule.stage_placement import loop


def rank_order(rank: int, shape: ScheduleShape) -> Iterator[Action]:
    """One batch of `rank`, which holds stage `rank`."""
    again = rank < shape.p - 1
    for action in one_f_one_b(rank, shape.m, warmup=shape.p - rank if again else 0):
        if again and action.kind == BACKWARD:
            yield recompute(rank, action.microbatch)
        yield action


def warnings(shape: ScheduleShape) -> Iterator[str]:
    if shape.p == 1:
        yield (
            "`pipeline_schedule`=shifted-critical-path: recomputes nothing on one pipeline rank, whose stage is the "
            "last; use `recompute_granularity`=full"
        )


SCHEDULE = flush_schedule(
    "shifted-critical-path",
    "Shifted critical path: recomputation ahead of the gradient, none on the last stage",
    "Lai et al. 2022, arXiv:2206.04959",
    lambda shape: loop(shape.p),
    rank_order,
    lambda rank, shape: PeakActivations(1),
    program_facts=lambda shape: {"recomputed": frozenset(range(shape.p - 1))},
    warnings=warnings,
    recomputes=True,
    in_flight=lambda shape: min(shape.m, shape.p + 1),
)
