"""`--delayed-parameter-update`: every batch runs on weights that lack the update of the batch before it.

    undelayed    batch 0 | step 0 | batch 1 | step 1 | batch 2
    delayed      batch 0 | batch 1          | batch 2             ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840)
                           step 0             step 1

    W(t+1) = W(t) - lr * g_t(W(t-1)),    W(-1) := W(0)

It is PipeDream-2BW's rule, for any schedule that flushes: two weight versions, gradients one update old. STEP t stays
where it was, at the end of batch t; what it writes is first read by batch t + 2, so a step on the host has the whole of
batch t + 1 to finish.
"""

from __future__ import annotations

from dataclasses import replace

from megalite.errors import ScheduleError
from megalite.schedule.action import NONE, Action
from megalite.schedule.program import BatchRange, Program


def delay_update(program: Program) -> Program:
    """The same order of computations on weights one update older. Raises ScheduleError unless the program flushes."""
    if program.asynchronous or program.rounds is not None:
        raise ScheduleError(f"`delayed_parameter_update`: {program.name} has no flush after every batch")

    def order(rank: int, batch: BatchRange) -> list[Action]:
        return [_older(action) for action in program.order(rank, batch)]

    return replace(
        program,
        order=order,
        weight_versions=(2,) * program.num_ranks,
        staleness=(1,) * program.num_stages,
    )


def _older(action: Action) -> Action:
    if action.parts:
        return action._replace(parts=tuple(_older(part) for part in action.parts))
    return action if action.version == NONE else action._replace(version=max(action.version - 1, 0))
