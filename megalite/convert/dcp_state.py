"""What torchtitan and DeepSpeed have left beside a model's weights: Adam's moments and steps.

    optimizer.state.KEY.exp_avg, exp_avg_sq       moments of the weight KEY, in its shape and order of rows
    optimizer.state.KEY.step                      steps that the optimizer has done

The schedules of such a run are programs, and its place in the data is its loader's own: the flags say both anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalite.config import Config
from megalite.convert.dcp_model import DcpSource
from megalite.convert.deepspeed_files import STATE
from megalite.convert.registry import config_of_weights
from megalite.convert.source import MOMENTS, WEIGHTS_ALONE, AdamRun
from megalite.errors import CheckpointError
from megalite.inventory import parameter_shapes

CONTINUED = "continued"
"""Where a checkpoint of ours says how far a run has got whose samples, schedules and seed are not known."""


def state_of_dcp(source: DcpSource) -> DcpState | None:
    """The state of a run; None where the weights alone were saved. Raises CheckpointError where a part is missing."""
    return DcpState(source) if any(name.startswith("optimizer.") for name in source.files.names) else None


class DcpState(AdamRun):
    """A `TrainedRun`. Raises CheckpointError where the optimizer is not Adam, or a tensor has another shape."""

    def __init__(self, source: DcpSource) -> None:
        self._source, self.model, self.where = source, source.model, str(source.directory)
        for name in parameter_shapes(source.model):
            for kind in MOMENTS:
                source.check_state(name, kind)
        names = [f"{STATE}{name}.step" for name in source.stored]
        for name in names:
            source.require(name)
        steps = {float(source.files.read(name)) for name in names}
        if len(steps) != 1 or not next(iter(steps)).is_integer() or not 0 <= next(iter(steps)) < 2**53:
            what = "does not say how many steps its optimizer has done"
            raise CheckpointError(f"{self.where}: {what}; {WEIGHTS_ALONE}")
        self.steps = int(steps.pop())
        progress: tuple[int, int | None] = source.files.progress or (self.steps, None)
        self.iteration, self.samples = progress
        if self.iteration < self.steps:
            raise CheckpointError(f"{self.where}: {self.steps} steps of its optimizer in {self.iteration} iterations")

    @property
    def config(self) -> Config:
        """Of the model; the rest is not known."""
        return config_of_weights(self.model, torch.float32)

    @property
    def meta(self) -> Mapping[str, Any]:
        """Iterations done, the steps of the optimizer among them, and samples consumed where known."""
        return {CONTINUED: {"iteration": self.iteration, "steps": self.steps, "samples": self.samples}}

    def part(self, kind: str, name: str) -> Tensor:
        return self._source.read(name, kind)
