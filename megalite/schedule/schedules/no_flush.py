"""The endless 1F1B stream that PipeDream and PipeDream-2BW share. It never drains; an iteration is a window on it.

Rank r runs w = p-1-r forwards ahead. After the warm-up, time slot k holds F(k + w) and B(k). On rank r the window of
batch t covers the slots

    start(t) + delay(t)  ..  end(t) + delay(t+1) - 1

where `delay` is the number of slots between the last backward of a batch and its STEP. The slots after the end of the
batch work on batch t + 1, which hides the reduction and the norm of batch t; NORM comes before the backward of one of
them. The last window of a run has neither those slots nor any forward of batch t + 1.

    rank 0 of two, batches of two, delay 1      | F0  F1 B0  F2 B1  F3 B2 STEP0 | F4 B3  F5 B4 STEP1 | B5 STEP2 |
"""

from collections.abc import Callable, Iterator

from megalite.schedule.action import Action, backward, forward, norm, step
from megalite.schedule.definition import ScheduleShape
from megalite.schedule.program import BatchRange


def window(
    shape: ScheduleShape,
    rank: int,
    batch: BatchRange,
    *,
    warmup: int,
    delay: Callable[[int], int],
    version: Callable[[int, BatchRange], int],
    step_after: int | None = None,
    norm_delay: int = 0,
) -> Iterator[Action]:
    """Iteration `batch` of a rank. Where ranks take turns, slots and micro-batches are counted in those of the rank's
    own turns.

    delay(size): slots into a batch of `size` micro-batches before the STEP of the previous batch.
    version(microbatch, batch): weight version of a micro-batch of this or the next batch.
    norm_delay: slots between the last backward of a batch and its NORM.
    step_after: a STEP follows every so many micro-batches; None: one at the end of each batch.
    """
    stage = shape.stage_of(rank)
    turn, turns = shape.placement.turn_of(rank)
    batch = batch._replace(start=batch.start // turns, size=batch.size // turns, next_size=batch.next_size // turns)

    def compute(build: Callable[..., Action], microbatch: int) -> Action:
        return build(stage, microbatch * turns + turn, version=version(microbatch, batch))

    last_forward = batch.end + batch.next_size
    if batch.first:
        yield from (compute(forward, k) for k in range(batch.start, min(batch.start + warmup, last_forward)))
    begin = batch.start if batch.first else batch.start + delay(batch.size)
    end = batch.end + delay(batch.next_size) if batch.next_size else batch.end
    for k in range(begin, end):
        if k + warmup < last_forward:
            yield compute(forward, k + warmup)
        if k == batch.end + norm_delay and step_after is None:
            yield norm(stage, batch.iteration)
        yield compute(backward, k)
        if step_after is not None and (k + 1) % step_after == 0:
            yield step(stage, k // step_after)
    if step_after is None:
        yield step(stage, batch.iteration)


def too_far_ahead(name: str, shape: ScheduleShape, ahead: int, why: str, least: int) -> Iterator[str]:
    """The problem of a batch that is too short for the forwards that its first rank runs ahead, if it is."""
    if shape.m < least:
        rule = "m >= p-1 =" if not shape.workers else "m >="
        yield (
            f"`pipeline_schedule`={name}: m = {shape.m} micro-batches per batch with p = {shape.placement.num_ranks} "
            f"ranks: rank 0 runs {ahead} forwards ahead{why} ({rule} {least}); raise `global_batch_size` or use "
            "`pipeline_schedule`=1f1b"
        )


def least_microbatches(shape: ScheduleShape) -> int:
    """The fewest micro-batches of a batch with which no rank runs further ahead than the next batch."""
    placement = shape.placement
    return max(shape.ahead(rank) * placement.turn_of(rank)[1] for rank in range(placement.num_ranks))
