"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).

    p=3, m=3, backward twice as long as forward
    rank 0  F0 F1 F2 .. .. .. .. .. .. B0-B0 B1-B1 B2-B2
    rank 1  .. F0 F1 F2 .. .. .. B0-B0 B1-B1 B2-B2 .. ..
    rank 2  .. .. F0 F1 F2 B0-B0 B1-B1 B2-B2 .. .. .. ..

Idle per rank (p-1)(tF+tB); every rank holds the activations of all m micro-batches. Backwards run in the order of the
forwards, so gradients are summed in the same order as without a pipeline.
"""

from megalite.schedule.definition import flush_schedule
from megalite.schedule.program import PeakActivations
from megalite.schedule.schedules.one_f_one_b import one_f_one_b

SCHEDULE = flush_schedule(
    "gpipe",
    "GPipe: all forwards, then all backwards",
    "Huang et al. 2019, arXiv:1811.06965",
    lambda shape: shape.placement,
    lambda rank, shape: one_f_one_b(shape.stage_of(rank), shape.m, warmup=shape.m),
    lambda rank, shape: PeakActivations(shape.m),
    in_flight=lambda shape: shape.m,
    takes_turns=True,
)
