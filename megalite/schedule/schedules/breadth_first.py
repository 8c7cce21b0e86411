"""Breadth-first: looped GPipe, every micro-batch through one chunk before the next chunk (Lamy-Poirier 2023,
arXiv:2211.05953).

    p=2, v=2, m=2 (small letters: second chunk)
    rank 0  F0 F1 f0 f1 .. .. .. b0-b0 b1-b1 B0-B0 B1-B1
    rank 1  .. F0 F1 f0 f1 b0-b0 b1-b1 B0-B0 B1-B1 .. ..

Idle (p-1)(tF+tB)/v. Activations of all m micro-batches are held, so it is meant for small batches (m near p). What it
buys: with sharded weights (ZeRO-3) a chunk is gathered once per direction and batch instead of once per micro-batch,
and the gradient of a chunk is reduced while the next one computes.
"""

from collections.abc import Iterator

from megalite.schedule.action import Action, backward, forward
from megalite.schedule.definition import ScheduleShape, fewer_than, flush_schedule
from megalite.schedule.program import PeakActivations
from megalite.schedule.stage_placement import loop


def rank_order(rank: int, shape: ScheduleShape) -> Iterator[Action]:
    """One batch of `rank`; chunk c is stage c*p + rank."""
    p, m, v, _ = shape[:4]
    for chunk in range(v):
        yield from (forward(chunk * p + rank, k) for k in range(m))
    for chunk in reversed(range(v)):
        yield from (backward(chunk * p + rank, k) for k in range(m))


SCHEDULE = flush_schedule(
    "breadth-first",
    "Breadth-first: looped GPipe, made for sharded weights",
    "Lamy-Poirier 2023, arXiv:2211.05953",
    lambda shape: loop(shape.p, shape.v),
    rank_order,
    lambda rank, shape: PeakActivations(shape.m * shape.v),
    lambda shape: fewer_than(
        "breadth-first", shape, "p", shape.p, "1f1b", ", so a chunk is done before its input has come round"
    ),
    num_chunks=None,
    min_chunks=2,
    gathers_once=True,
    idle=lambda f, i, w, v: (f + i + w) / v,
    in_flight=lambda shape: shape.m,
)
