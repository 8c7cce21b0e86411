"""Micro-batches through the pipeline without a backward: evaluation, scoring, generation, the library's `evaluate`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.comm import Channel
from megalite.microbatch import StageInput
from megalite.parallel.pipeline import Events, Executor, Stage
from megalite.schedule import Program, StageKey


def run_forwards(
    program: Program,
    rank: int,
    stages: Mapping[StageKey, Stage],
    channel: Channel,
    microbatches: Sequence[StageInput],
) -> dict[int, Tensor]:
    """Number of a micro-batch -> what the last stage makes of it, in order, on the rank that does. Collective over the
    pipeline.

    program: of forwards alone (`schedule.forward_program`). rank: along the pipeline. stages: this rank's.
    """
    executor = Executor(rank, stages, program.placement, channel, Events())
    actions = program.actions_for_batch(rank, program.batch(0, last=True))
    updates = list(executor.run(actions, Given(microbatches, torch.ones(()))))
    assert not updates, "a run without a backward changes no weights"
    if program.rounds is None or program.rounds.number == 1:
        executor.finish()
    else:  # a part of a prompt goes through the first round alone, and nobody takes what that hands on
        channel.flush()
    found = executor.take_losses()
    return {number: found[number] for number in sorted(found)}


@dataclass(frozen=True)
class Given:
    """A source of micro-batches that are all in memory."""

    microbatches: Sequence[StageInput]
    factor: Tensor  # of each loss, 0-dim
    first: int = 0  # number of the first one

    def get(self, microbatch: int) -> tuple[StageInput, Tensor]:
        return self.microbatches[microbatch - self.first], self.factor
