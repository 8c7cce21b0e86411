"""Eager 1F1B: 1F1B with twice the warm-up, which hides the wire (Zhuang et al. 2023, arXiv:2211.05322).

    p=3, m=5
    rank 0  F0 F1 F2 F3 F4 .. .. B0-B0 .. B1-B1 .. B2-B2 .. B3-B3 .. B4-B4
    rank 1  .. F0 F1 F2 .. B0-B0 F3 B1-B1 F4 B2-B2 .. B3-B3 .. B4-B4 .. ..
    rank 2  .. .. F0 B0-B0 F1 B1-B1 F2 B2-B2 F3 B3-B3 F4 B4-B4 .. .. .. ..

Same bubble as 1F1B while messages are free. With a hop time tC, 1F1B pays it at every micro-batch, this one 2(p-1)
times in all. The price: rank r holds min(m, 2(p-r)-1) micro-batches.
"""

from megalite.schedule.definition import flush_schedule
from megalite.schedule.program import PeakActivations
from megalite.schedule.schedules.one_f_one_b import one_f_one_b

SCHEDULE = flush_schedule(
    "eager-1f1b",
    "Eager 1F1B: twice the warm-up, so that messages hide behind computation",
    "Zhuang et al. 2023, arXiv:2211.05322",
    lambda shape: shape.placement,
    lambda rank, shape: one_f_one_b(shape.stage_of(rank), shape.m, warmup=2 * shape.ahead(rank)),
    lambda rank, shape: PeakActivations(min(shape.m, 2 * shape.ahead(rank) + 1)),
    in_flight=lambda shape: min(shape.m, 2 * shape.p - 1),
    takes_turns=True,
)
