"""Message-driven: a rank runs whatever has arrived (AxoNN; Singh and Bhatele 2022, arXiv:2110.13005).

    p=3, m=5
    rank 0  F0 F1 F2 F3 F4 .. .. B0-B0 .. B1-B1 .. B2-B2 .. B3-B3 .. B4-B4
    rank 1  .. F0 F1 F2 F3 B0-B0 F4 B1-B1 .. B2-B2 .. B3-B3 .. B4-B4 .. ..
    rank 2  .. .. F0 B0-B0 F1 B1-B1 F2 B2-B2 F3 B3-B3 F4 B4-B4 .. .. .. ..

At most L micro-batches are in flight (`--pipeline-max-in-flight`; 2p-1 if it is not given). The list is what comes of
equal times; a run may take forwards and backwards in another turn (`schedule/arrival.py`), each of them in the order of
the micro-batches. So gradients are added up in that order, and bits do not depend on what arrives when.
"""

from functools import lru_cache

from megalite.schedule.action import FORWARD, Action
from megalite.schedule.arrival import arrival_orders
from megalite.schedule.definition import ScheduleShape, flush_schedule
from megalite.schedule.program import PeakActivations


def limit_of(shape: ScheduleShape) -> int:
    """L."""
    return shape.max_in_flight or 2 * shape.p - 1


@lru_cache(maxsize=8)
def _orders(p: int, m: int, limit: int) -> list[list[tuple[str, int]]]:
    return arrival_orders(p, [m], limit, lambda rank, kind: 1 if kind == FORWARD else 2, 0)


SCHEDULE = flush_schedule(
    "message-driven",
    "Message-driven: each rank runs whatever has arrived",
    "Singh and Bhatele 2022, arXiv:2110.13005",
    lambda shape: shape.placement,
    lambda rank, shape: (Action(kind, rank, k) for kind, k in _orders(shape.p, shape.m, limit_of(shape))[rank]),
    # of L micro-batches in flight the last rank holds one
    lambda rank, shape: PeakActivations(min(shape.m, limit_of(shape)) if rank + 1 < shape.p else 1),
    program_facts=lambda shape: {"max_in_flight": limit_of(shape)},
    in_flight=lambda shape: min(shape.m, limit_of(shape)),
    takes_arrivals=True,
)
