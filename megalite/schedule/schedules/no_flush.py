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
from megalite.schedule.program import BatchRange


def window(
    stage: int,
    batch: BatchRange,
    *,
    warmup: int,
    delay: Callable[[int], int],
    version: Callable[[int, BatchRange], int],
    step_per_microbatch: bool,
    norm_delay: int = 0,
) -> Iterator[Action]:
    """Iteration `batch` of the rank that holds `stage`.

    delay(size): slots into a batch of `size` micro-batches before the STEP of the previous batch.
    version(microbatch, batch): weight version of a micro-batch of this or the next batch.
    norm_delay: slots between the last backward of a batch and its NORM.
    """

    def compute(build: Callable[..., Action], microbatch: int) -> Action:
        return build(stage, microbatch, version=version(microbatch, batch))

    last_forward = batch.end + batch.next_size
    if batch.first:
        yield from (compute(forward, k) for k in range(batch.start, min(batch.start + warmup, last_forward)))
    begin = batch.start if batch.first else batch.start + delay(batch.size)
    end = batch.end + delay(batch.next_size) if batch.next_size else batch.end
    for k in range(begin, end):
        if k + warmup < last_forward:
            yield compute(forward, k + warmup)
        if k == batch.end + norm_delay and not step_per_microbatch:
            yield norm(stage, batch.iteration)
        yield compute(backward, k)
        if step_per_microbatch:
            yield step(stage, k)
    if not step_per_microbatch:
        yield step(stage, batch.iteration)
