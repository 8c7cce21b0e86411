"""Interleaved 1F1B: v chunks per rank make the bubble v times smaller (Narayanan et al. 2021, arXiv:2104.04473).

    p=2, v=2, m=4: rank 0 holds stages 0 and 2, rank 1 stages 1 and 3 (small letters: second chunk)
    rank 0  F0 F1 f0 f1 F2 .. b0-b0 F3 b1-b1 f2 B0-B0 f3 B1-B1 .. b2-b2 .. b3-b3 B2-B2 B3-B3
    rank 1  .. F0 F1 f0 b0-b0 f1 b1-b1 F2 B0-B0 F3 B1-B1 f2 b2-b2 f3 b3-b3 B2-B2 B3-B3 .. ..

Chunk-forwards go round in groups of p micro-batches: the group through chunk 0, then the same group through chunk 1,
and so on; backwards go the same way with the chunks reversed. Rank r runs 2(p-1-r) + (v-1)p chunk-forwards ahead. Idle
(p-1)(tF+tB)/v, where tF and tB are times of a whole rank; v times the messages; a factor of 1 + (p-1)/(pv) in
activations.
"""

from collections.abc import Iterator

from megalite.schedule.action import FORWARD, Action
from megalite.schedule.definition import ScheduleShape, flush_schedule
from megalite.schedule.program import PeakActivations
from megalite.schedule.schedules.one_f_one_b import one_f_one_b
from megalite.schedule.stage_placement import loop


def warmup_chunks(rank: int, shape: ScheduleShape) -> int:
    """Chunk-forwards before the first backward's forward."""
    p, m, v, _ = shape[:4]
    return min(m * v, 2 * (p - 1 - rank) + (v - 1) * p)


def rank_order(rank: int, shape: ScheduleShape) -> Iterator[Action]:
    """One batch of `rank`: 1F1B, whose m v turns are told as chunks and micro-batches; chunk c is stage c*p + rank."""
    p, m, v, _ = shape[:4]
    for action in one_f_one_b(rank, m * v, warmup_chunks(rank, shape)):
        group, within = divmod(action.microbatch, p * v)
        chunk, member = divmod(within, p)
        chunk = chunk if action.kind == FORWARD else v - 1 - chunk
        yield action._replace(stage=chunk * p + rank, microbatch=group * p + member)


def problems(shape: ScheduleShape) -> Iterator[str]:
    if shape.m % shape.p:
        yield (
            f"`pipeline_schedule`=interleaved: m = {shape.m} micro-batches per batch is not a multiple of p = "
            f"{shape.p} ranks, which take micro-batches in groups of p; change `global_batch_size`, or use "
            "`pipeline_schedule`=1f1b"
        )


SCHEDULE = flush_schedule(
    "interleaved",
    "Interleaved 1F1B: v chunks per rank, bubble divided by v",
    "Narayanan et al. 2021, arXiv:2104.04473",
    lambda shape: loop(shape.p, shape.v),
    rank_order,
    lambda rank, shape: PeakActivations(min(shape.m * shape.v, warmup_chunks(rank, shape) + 1)),
    problems,
    aliases=("interleaved-1f1b",),
    num_chunks=None,
    min_chunks=2,
    idle=lambda f, i, w, v: (f + i + w) / v,
    in_flight=lambda shape: min(shape.m, shape.p + (shape.p - 1) / shape.v),
)
