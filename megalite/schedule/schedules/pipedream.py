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
Where ranks of a stage take turns, an update is made of one round of micro-batches, as many as bring every rank of
every stage to its turn equally often; in the uniform case that is one on each replica.
With vertical sync a micro-batch uses on every stage the version that the first stage has when it enters: p-1 updates
old everywhere, one gradient of one set of weights, for p versions on every rank instead of p-r.
Because a decision to stop is taken one batch ahead, the forwards may not run further than that: m >= p-1.
"""

from collections.abc import Iterator

from megalite.schedule.action import Action
from megalite.schedule.definition import Schedule, ScheduleShape
from megalite.schedule.program import BatchRange, PeakActivations, Program
from megalite.schedule.schedules.no_flush import too_far_ahead, window


def build(shape: ScheduleShape) -> Program:
    placement, ahead = shape.placement, updates_ahead(shape)
    ranks = range(placement.num_ranks)
    own = [placement.round // placement.turn_of(rank)[1] for rank in ranks]  # micro-batches of a rank in an update
    behind = [ahead[shape.stage_of(rank)] for rank in ranks]

    def order(rank: int, batch: BatchRange) -> list[Action]:
        used = ahead[0] if shape.vertical_sync else behind[rank]
        return list(
            window(
                shape,
                rank,
                batch,
                warmup=behind[rank] * own[rank],
                delay=lambda size: 0,
                version=lambda microbatch, _: max(microbatch // own[rank] - used, 0),
                step_after=own[rank],
            )
        )

    return Program(
        name="pipedream",
        placement=placement,
        num_microbatches=shape.m,
        order=order,
        weight_versions=tuple(1 + (ahead[0] if shape.vertical_sync else behind[rank]) for rank in ranks),
        peak_activations=tuple(PeakActivations(behind[rank] * own[rank] + 1) for rank in ranks),
        staleness=(ahead[0],) * shape.p if shape.vertical_sync else ahead,
        asynchronous=True,
        update_per_microbatch=True,
        consistent=shape.vertical_sync or shape.p == 1,
    )


def updates_ahead(shape: ScheduleShape) -> tuple[int, ...]:
    """Per stage, updates that its forwards run ahead of its backwards: whole ones, as many as keep the ranks behind it
    at work, and no fewer than the next stage."""
    placement, found = shape.placement, [0]
    for stage in reversed(range(shape.p - 1)):
        first = placement.rank_of(stage)
        found.append(max(-(-shape.ahead(first) * placement.turn_of(first)[1] // placement.round), found[-1]))
    return tuple(reversed(found))


def problems(shape: ScheduleShape) -> Iterator[str]:
    ahead = updates_ahead(shape)[0] * shape.placement.round
    return too_far_ahead("pipedream", shape, ahead, ", beyond the next batch", ahead)


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
    takes_turns=True,
)
