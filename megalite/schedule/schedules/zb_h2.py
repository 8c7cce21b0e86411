"""ZB-H2: split backward and twice the warm-up, no bubble at equal times (Qi et al. 2024, arXiv:2401.10241).

    p=2, m=3 (I: gradient of the input, W: of the weights)
    rank 0  F0 F1 F2 I0 W0 I1 W1 I2 W2 ..
    rank 1  .. F0 I0 F1 I1 F2 I2 W0 W1 W2

Each rank works without a gap from its first to its last action: a parallelogram. Idle (p-1)(tF+tI-2tW) beyond the skew,
which the next batch would fill if the optimizer did not make all ranks wait. Rank r holds 2(p-r)-1 whole micro-batches
and 2r of which only what W needs is left.
"""

from megalite.schedule.definition import fewer_than, flush_schedule
from megalite.schedule.program import PeakActivations
from megalite.schedule.schedules.one_f_one_b import one_f_one_b
from megalite.schedule.stage_placement import loop

SCHEDULE = flush_schedule(
    "zb-h2",
    "ZB-H2: split backward, no gaps inside a rank, twice the memory",
    "Qi et al. 2024, arXiv:2401.10241",
    lambda shape: loop(shape.p),
    lambda rank, shape: one_f_one_b(rank, shape.m, warmup=2 * (shape.p - 1 - rank), delay=2 * rank),
    lambda rank, shape: PeakActivations(2 * (shape.p - rank) - 1, 2 * rank),
    lambda shape: fewer_than("zb-h2", shape, "2p-1", 2 * shape.p - 1, "zb-h1"),
    splits_backward=True,
    idle=lambda f, i, w, v: max(0.0, f + i - 2 * w),
    in_flight=lambda shape: min(shape.m, 2 * shape.p - 1),
)
