"""A stage that only evaluates, for `schedule.forward_program` and the same executor."""

from __future__ import annotations

from torch import Tensor

from megalite.comm import TensorSpec
from megalite.microbatch import StageInput
from megalite.parallel.pipeline.stage import Stage


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
