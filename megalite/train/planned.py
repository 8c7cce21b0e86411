"""A run before anything of the model's size is allocated: what its start and `--dry-run` say and check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config import Config
from megalite.inventory import MemoryPlan, stage_layer_ranges
from megalite.planner import PlannedStages, RankMemory
from megalite.schedule import Program
from megalite.train.foreign import ForeignModel
from megalite.train.foreign_memory import memory_of


@dataclass(frozen=True)
class PlannedRun(PlannedStages):
    """foreign: the module of `--model-module`, if it is one; memory: of its ranks at each pipeline coordinate."""

    foreign: ForeignModel | None = None
    memory: Sequence[RankMemory] | None = None

    @classmethod
    def before(
        cls,
        config: Config,
        world_size: int,
        program: Program,
        plan: MemoryPlan,
        foreign: ForeignModel | None,
        *,
        on_cpu: bool,
    ) -> PlannedRun:
        """Asked before the stages are built."""
        if foreign is None:
            return cls(config, world_size, program, stage_layer_ranges(config, program), plan, on_cpu)
        memory = memory_of(config, world_size, program, foreign, plan, on_cpu=on_cpu)
        return cls(config, world_size, program, foreign.cuts, plan, on_cpu, foreign, memory)
