"""ZB-H1: 1F1B with the weight gradients moved into the bubble (Qi et al. 2024, arXiv:2401.10241).

    p=3, m=4 (I: gradient of the input, W: of the weights)
    rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

Only the input gradient is on the way to the previous stage; W may run whenever there is time. Rank r delays W by r
micro-batches. Idle (p-1)(tF+tI-tW), a third of 1F1B's at equal times, at no more than p micro-batches of activations
per rank: (p-r) whole ones and r of which only what W needs is left.
"""

from megalite.schedule.definition import fewer_than, flush_schedule
from megalite.schedule.program import PeakActivations
from megalite.schedule.schedules.one_f_one_b import one_f_one_b

SCHEDULE = flush_schedule(
    "zb-h1",
    "ZB-H1: split backward, a third of 1F1B's bubble, same memory",
    "Qi et al. 2024, arXiv:2401.10241",
    lambda shape: shape.placement,
    lambda rank, shape: one_f_one_b(
        shape.stage_of(rank), shape.m, warmup=shape.ahead(rank), delay=max(0, shape.ahead(0) - shape.ahead(rank))
    ),
    lambda rank, shape: PeakActivations(shape.ahead(rank) + 1, max(0, shape.ahead(0) - shape.ahead(rank))),
    lambda shape: fewer_than("zb-h1", shape, "p", shape.placement.num_ranks, "1f1b"),
    takes_turns=True,
    splits_backward=True,
    idle=lambda f, i, w, v: max(0.0, f + i - w),
)
