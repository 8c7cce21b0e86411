"""What torchtitan has left in torch.distributed.checkpoint beside a model's weights: Adam's moments and steps.

    optimizer.state.KEY.exp_avg, exp_avg_sq       moments of the weight KEY, in its shape and order of rows
    optimizer.state.KEY.step                      steps that the optimizer has done

The schedules of such a run are programs, and its place in the data is its loader's own: the flags say both anew.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

import torch
from torch import Tensor

from megalite.convert.dcp_model import DcpSource
from megalite.errors import CheckpointError
from megalite.inventory import parameter_shapes

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "optimizer/step"


def state_of_dcp(source: DcpSource) -> DcpState | None:
    """The state of a run; None where the weights alone were saved. Raises CheckpointError where a part is missing."""
    return DcpState(source) if any(name.startswith("optimizer.") for name in source.files.tensors) else None


class DcpState:
    """A `ReadableRun`. Raises CheckpointError where the optimizer is not Adam, or a tensor has another shape."""

    def __init__(self, source: DcpSource) -> None:
        self._source, self._where = source, str(source.directory)
        for name in parameter_shapes(source.model):
            for kind in MOMENTS:
                source.check_state(name, kind)
        steps = {float(source.files.read(key)) for key in source.states("step")}
        if len(steps) != 1 or not next(iter(steps)).is_integer() or not 0 <= next(iter(steps)) < 2**53:
            raise CheckpointError(f"{self._where}: does not say how many steps its optimizer has done; use `finetune`")
        self.iteration = int(steps.pop())

    @cached_property
    def names(self) -> Collection[str]:
        """Names in a checkpoint of ours of all that is there."""
        weights = parameter_shapes(self._source.model).keys()
        return {*weights, STEP, *(f"optimizer/{kind}/{name}" for kind in MOMENTS for name in weights)}

    def stored(self, name: str) -> Tensor:
        """One of them. Raises CheckpointError."""
        if name not in self.names:
            raise CheckpointError(f"{self._where}: holds no {name}; use `finetune`")
        if name == STEP:
            return torch.tensor(float(self.iteration))
        kind, _, owner = name.removeprefix("optimizer/").partition("/")
        return self._source.read(owner, kind) if owner else self._source.read(name)
