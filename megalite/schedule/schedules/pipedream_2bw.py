"""PipeDream-2BW: 1F1B without flushes, on two weight versions (Narayanan et al. 2021, arXiv:2006.09503).

    p=2, m=2, three batches: {0, 1}, {2, 3}, {4, 5}
    rank 0  F0 F1 .. .. B0-B0 F2 B1-B1 F3 B2-B2 F4 B3-B3 F5 B4-B4 .. B5-B5
    rank 1  .. F0 B0-B0 F1 B1-B1 F2 B2-B2 F3 B3-B3 F4 B4-B4 F5 B5-B5 .. ..

On every stage, forward and backward of batch t use weights that are one update old, and the update is applied to the
newest weights:

    W(t+1) = W(t) - lr * g_t(W(t-1)),    W(-1) := W(0)

So micro-batches of batch t use version max(t-1, 0). Version t-1 is no longer needed when batch t, its last user, is
done, which is when version t+1 is written: two copies suffice. The bubble (p-1)(tF+tB) is paid once per run instead of
once per batch.

Why m >= p-1: on rank r, which runs w = p-1-r forwards ahead, the first forward of batch t+2 is in slot end(t+1) - w. It
needs version t+1, and update t can run after slot end(t) - 1, which is m - w slots earlier; m - w must not be negative
on any rank. These m - w slots are slack, in which the data-parallel reduction, the sum of tied embeddings and the
global norm travel while the pipeline computes: clipping is exact and costs no time. Rank r finishes its backwards r tB
before rank 0. Its share of the norm leaves when rank 0's does (NORM), and the sum is not needed until STEP, two slots
later if there are that many.
"""

from collections.abc import Iterator

from megalite.schedule.action import Action
from megalite.schedule.definition import Schedule, ScheduleShape
from megalite.schedule.program import BatchRange, PeakActivations, Program
from megalite.schedule.schedules.no_flush import least_microbatches, too_far_ahead, window


def norm_delay(shape: ScheduleShape, rank: int, m: int) -> int:
    """Slots of batch t + 1 (of m micro-batches of a rank) that `rank` runs between its last backward of batch t and
    NORM t.

    As many slots of tF + tB as fill r tB, with tB = 2 tF, and one more for the reduction if rank 0 has three or more.
    """
    if shape.workers:
        return step_delay(shape, rank, m) // 2
    return (2 * rank + 2) // 3 + (1 if m - (shape.p - 1) >= 3 else 0)


def step_delay(shape: ScheduleShape, rank: int, m: int) -> int:
    """The same between the last backward of batch t and STEP t.

    Where ranks take turns, as many micro-batches on all stages: two rounds, or one, or none, as a batch has room for
    them behind the forwards that the first stage runs ahead. So no rank needs what another computes after its STEP.
    """
    if not shape.workers:
        return min(m - shape.ahead(rank), norm_delay(shape, rank, m) + 2)
    turns, together = shape.placement.turn_of(rank)[1], shape.placement.round
    return max(0, min(2, (m * turns - least_microbatches(shape)) // together)) * together // turns


def version(microbatch: int, batch: BatchRange) -> int:
    """The version one update older than the newest available to this batch; batches 0 and 1 both use the first."""
    own = batch.iteration if microbatch < batch.end else batch.iteration + 1
    return max(own - 1, 0)


def build(shape: ScheduleShape) -> Program:
    placement, p = shape.placement, shape.p
    ranks = range(placement.num_ranks)

    def order(rank: int, batch: BatchRange) -> list[Action]:
        turns = placement.turn_of(rank)[1]
        return list(
            window(
                shape,
                rank,
                batch,
                warmup=shape.ahead(rank),
                delay=lambda size: step_delay(shape, rank, size) if p > 1 else 0,
                version=version,
                norm_delay=norm_delay(shape, rank, batch.next_size // turns),
            )
        )

    return Program(
        name="2bw",
        placement=placement,
        num_microbatches=shape.m,
        order=order,
        weight_versions=(2,) * len(ranks),
        peak_activations=tuple(PeakActivations(shape.ahead(rank) + 1) for rank in ranks),
        staleness=(1,) * p,
        asynchronous=True,
        gradient_buffers=2 if p > 1 else 1,
    )


def problems(shape: ScheduleShape) -> Iterator[str]:
    why = " and would need weights before their update"
    return too_far_ahead("2bw", shape, shape.ahead(0), why, least_microbatches(shape))


def warnings(shape: ScheduleShape) -> Iterator[str]:
    if shape.m < shape.p and not shape.workers:
        yield (
            f"`pipeline_schedule`=2bw: m = p-1 = {shape.m} leaves no slack on rank 0 between an update and its first "
            f"use: reduction and norm are not hidden; m >= p = {shape.p} micro-batches per batch is faster"
        )


SCHEDULE = Schedule(
    "2bw",
    "PipeDream-2BW: no flush, two weight versions, gradients one update old",
    "Narayanan et al. 2021, arXiv:2006.09503",
    build,
    problems,
    warnings,
    asynchronous=True,
    flush_schedule="1f1b",
    zero_excluded={
        2: "gradient shards of an unflushed pipeline would be reduced once per micro-batch",
        3: "gathering weights would need both weight versions at once",
    },
    idle=lambda f, i, w, v: 0.0,
    takes_turns=True,
)
