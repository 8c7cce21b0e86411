"""State that belongs to the weights: each update changes it, and each weight version has its own.

The optimizer is stepped first; what else there is (biases of experts, scales of fp8) are instances of `VersionedState`
in the list `Weights.states`. A model without them has an empty list.

Adding one, and where other state lies: CONTRIBUTING, "Adding state that an update changes".
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from megalite.comm import Axis, TensorShard, all_reduce_
from megalite.parallel.pipeline import Stage
from megalite.parallel.zero import ShardedOptimizer
from megalite.schedule import StageKey


class VersionedState(ABC):
    """State of this rank's stages. axis: the ranks of a stage, whose tokens differ. replicas: by stage, other ranks
    that hold it (Chimera). optimizer: over their buffers, once that is made (`build_weights`).

    absent: prefix of names that a checkpoint may lack, because the run that wrote it had no use for them; '' otherwise.
    """

    absent = ""
    optimizer: ShardedOptimizer

    def __init__(self, stages: Mapping[StageKey, Stage], axis: Axis, replicas: Mapping[int, Axis]) -> None:
        self.stages, self.axis, self._replicas = stages, axis, replicas

    def _over_ranks(self, stage: StageKey, values: Tensor, *, op: Literal["sum", "max"] = "sum") -> None:
        """Reduces values of a stage, in place, over all ranks that hold it."""
        for axis in (self.axis, self._replicas.get(stage[0])):
            if axis is not None:
                all_reduce_(values, axis, op=op)

    @abstractmethod
    def step(self, wanted: Callable[[int], bool], found_inf: Tensor, version: int) -> None:
        """Writes the state of weight version `version`. Collective over the ranks of each stage.

        wanted: whether a micro-batch belongs to the update. found_inf: 0-dim, on the device; not 0 where the update is
        skipped.
        """

    def copy(self, version: int, target: int) -> None:
        """Makes the state of version `target` that of `version`."""
        return None

    def shards(self, version: int, prefix: str = "") -> list[TensorShard]:
        """The state of a version, as a checkpoint holds it (views). A name that begins with `optimizer/` is left out by
        `--no-load-optim`. None, where the state has no values of its own."""
        return []

    def after_load(self, version: int) -> None:
        """Values were written through `shards(version)`."""
        return None
