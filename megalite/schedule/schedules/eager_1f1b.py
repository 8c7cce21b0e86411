"""Eager 1F1B: 1F1B with twice the warm-up, which hides the wire (Zhuang et al. 2023, arXiv:2211.05322).

    p=3, m=5
    rank 0  F0 F1 F2 F3 F4 .. .. B0-B0 .. B1-B1 .. B2-B2 .. B3-B3 .. B4-B4
    rank 1  .. F0 F1 F2 .. B0-B0 F3 B1-B1 F4 B2-B2 .. B3-B3 .. B4-B4 .. ..
    rank 2  .. .. F0 B0-B0 F1 B1-B1 F2 B2-B2 F3 B3-B3 F4 B4-B4 .. .. .. ..

Same bubble as 1F1B while messages are free. With a hop time tC, 1F1B pays it at every micro-batch, this one 2(p-1)
times in all. The price: rank r holds min(m, 2(p-r)-1) micro-batches.
"""

from megalite.schedule.placement import loop
from megalite.schedule.program import PeakActivations, Program, flush_program
from megalite.schedule.schedules.one_f_one_b import one_f_one_b
from megalite.schedule.shape import Schedule, ScheduleShape


def build(shape: ScheduleShape) -> Program:
    p = shape.p
    return flush_program(
        "eager-1f1b",
        loop(p),
        shape.m,
        lambda rank, m: one_f_one_b(rank, m, warmup=2 * (p - 1 - rank)),
        lambda rank, m: PeakActivations(min(m, 2 * (p - rank) - 1)),
    )


SCHEDULE = Schedule(
    "eager-1f1b",
    "Eager 1F1B: twice the warm-up, so that messages hide behind computation",
    "Zhuang et al. 2023, arXiv:2211.05322",
    build,
    in_flight=lambda shape: min(shape.m, 2 * shape.p - 1),
)
