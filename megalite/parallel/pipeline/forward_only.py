"""Forward-only runs (evaluation) as one more program for the same executor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from torch import Tensor

from megalite.comm import TensorSpec
from megalite.microbatch import StageInput
from megalite.parallel.pipeline.stage import Stage
from megalite.schedule import (
    Action,
    BatchRange,
    PeakActivations,
    Program,
    StagePlacement,
    forward,
    insert_communication,
)


@cache
def forward_program(placement: StagePlacement, num_microbatches: int) -> Program:
    """Every stage runs all micro-batches, first chunk first; nothing is kept for a backward. Only replica 0 is used.

    p=2, m=3     rank 0  F0 F1 F2
                 rank 1  .. F0 F1 F2
    """

    def order(rank: int, batch: BatchRange) -> Iterator[Action]:
        for stage, replica in placement.stages_of(rank):
            if replica == 0:
                for microbatch in range(batch.size):
                    yield forward(stage, batch.start + microbatch)

    ranks = placement.num_ranks
    program = Program(
        name="forward only",
        placement=placement,
        num_microbatches=num_microbatches,
        order=lambda rank, batch: list(order(rank, batch)),
        weight_versions=(1,) * ranks,
        peak_activations=(PeakActivations(0),) * ranks,
        staleness=(0,) * placement.num_stages,
    )
    return insert_communication(program)


class ForwardOnly(Stage):
    """A stage for an executor that only evaluates: one version of the weights, no graph, nothing kept."""

    def __init__(self, stage: Stage, version: int) -> None:
        self.modules = stage.modules
        self.spec: TensorSpec = stage.spec
        self.out_spec: TensorSpec = stage.out_spec
        self.is_first, self.is_last = stage.is_first, stage.is_last
        self._version = version

    def forward(self, number: int, x: Tensor | None, microbatch: StageInput, factor: Tensor, *, version: int) -> Tensor:
        return self.evaluate(x, microbatch, version=self._version)

    @property
    def num_in_flight(self) -> int:
        return 0
