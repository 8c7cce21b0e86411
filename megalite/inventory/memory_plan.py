"""Where the memory of a run lies and what its backward computes again, beside the configuration.

What flags say is `given_plan`; what a budget of memory leaves open `planner.within_budget` decides. The configuration
stays as it was given, so that a run which begins with it decides anew.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from megalite.config import Config, ModelConfig
from megalite.schedule import ActivationRoom, WeightChunks


class Recompute(NamedTuple):
    """Blocks of a stage whose forward runs again in backward.

    method: `uniform` (all of them, in chunks of `number`), `block` (the first `number`), or empty: none.
    """

    method: str = ""
    number: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Where the memory of a run lies.

    recompute: of every stage, or one for all. fraction: part of the masters and moments that is off the device.
    file_fraction: part of them that is in files. hosts_params: whether weights and gradients live on the host.
    room: what activations keep to, where some of them wait on the host. chunks: weights that come and go layer by
    layer, and the room that they have.
    """

    recompute: tuple[Recompute, ...] = (Recompute(),)
    fraction: float = 0.0
    file_fraction: float = 0.0
    hosts_params: bool = False
    room: ActivationRoom | None = None
    chunks: WeightChunks | None = None

    def recompute_of(self, stage: int) -> Recompute:
        return self.recompute[stage if len(self.recompute) > 1 else 0]

    def to_meta(self) -> dict[str, Any]:
        """For readers of a checkpoint."""
        return {
            "recompute": [list(each) for each in self.recompute],
            "optimizer_offload_fraction": self.fraction,
            "optimizer_file_fraction": self.file_fraction,
            "param_offload": self.hosts_params,
            "activation_room_bytes": None if self.room is None else list(self.room.capacity),
            "weight_room_bytes": None if self.chunks is None or self.chunks.capacity is None
            else list(self.chunks.capacity),
        }  # fmt: skip


DEFAULT_PLAN = MemoryPlan()
"""Everything stays on the device, and nothing is recomputed."""


def given_recompute(model: ModelConfig) -> tuple[Recompute, ...]:
    """What the flags say of whole layers, as in `MemoryPlan`."""
    if model.recompute_granularity != "full":
        return (Recompute(),)
    numbers, method = model.recompute_num_layers or (1,), model.recompute_method or "uniform"
    return tuple(Recompute(method, number) for number in numbers)


def given_plan(config: Config) -> MemoryPlan:
    """What the flags say; nothing of rooms."""
    offload = config.optimizer.offload
    hosted, in_file = offload.param_offload == "cpu", offload.optimizer_offload_path is not None
    moves = offload.optimizer_cpu_offload or in_file or hosted
    fraction = offload.optimizer_offload_fraction if moves else 0.0
    return MemoryPlan(given_recompute(config.model), fraction, fraction if in_file else 0.0, hosted)
