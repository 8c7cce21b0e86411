"""PipeDream: 1F1B without flushes, one update per micro-batch, weight stashing (Narayanan et al. 2019,
arXiv:1806.03377).

    p=2, m=2, two batches
    rank 0  F0 F1 .. .. B0-B0 F2 B1-B1 F3 B2-B2 .. B3-B3
    rank 1  .. F0 B0-B0 F1 B1-B1 F2 B2-B2 F3 B3-B3 .. ..

A forward uses the newest weights of its own stage, the backward of the same micro-batch the same (stashed) ones. Stage
r runs w_r = p-1-r forwards ahead, so micro-batch k meets version max(k - w_r, 0): gradients are p-1-r updates old,
differently on each stage, and rank r keeps p-r versions. An update is made of its own micro-batch alone, the mean over
all replicas, and the learning rate is that of one update. An iteration is the m micro-batches of the global batch: m
updates with one rate and one logged loss, their mean.
Because a decision to stop is taken one batch ahead, the forwards may not run further than that: m >= p-1.
"""

from megalite.schedule.action import Action
from megalite.schedule.definition import Schedule, ScheduleShape
from megalite.schedule.program import BatchRange, PeakActivations, Program
from megalite.schedule.schedules.no_flush import window
from megalite.schedule.stage_placement import loop


def build(shape: ScheduleShape) -> Program:
    p = shape.p

    def order(rank: int, batch: BatchRange) -> list[Action]:
        warmup = p - 1 - rank
        return list(
            window(
                rank,
                batch,
                warmup=warmup,
                delay=lambda size: 0,
                version=lambda microbatch, _: max(microbatch - warmup, 0),
                step_per_microbatch=True,
            )
        )

    return Program(
        name="pipedream",
        placement=loop(p),
        num_microbatches=shape.m,
        order=order,
        weight_versions=tuple(p - rank for rank in range(p)),
        peak_activations=tuple(PeakActivations(p - rank) for rank in range(p)),
        staleness=tuple(p - 1 - rank for rank in range(p)),
        asynchronous=True,
        update_per_microbatch=True,
        consistent=p == 1,
    )


def problems(shape: ScheduleShape) -> list[str]:
    if shape.m >= shape.p - 1:
        return []
    return [
        f"`pipeline_schedule`=pipedream: m = {shape.m} micro-batches per batch with p = {shape.p} ranks: rank 0 runs "
        f"{shape.p - 1} forwards ahead, beyond the next batch (m >= p-1 = {shape.p - 1}); raise `global_batch_size` or "
        "use `pipeline_schedule`=1f1b"
    ]


_OWN_STEP = "every stage steps after every micro-batch, so nothing can be sharded between steps"

SCHEDULE = Schedule(
    "pipedream",
    "PipeDream: no flush, one update per micro-batch, stashed weights",
    "Narayanan et al. 2019, arXiv:1806.03377",
    build,
    problems,
    asynchronous=True,
    update_per_microbatch=True,
    zero_excluded={1: _OWN_STEP, 2: _OWN_STEP, 3: _OWN_STEP},
    idle=lambda f, i, w, v: 0.0,
)
