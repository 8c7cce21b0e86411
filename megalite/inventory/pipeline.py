"""How a configuration runs on a pipeline: its program, and which layers each stage holds.

The trainer executes what these functions return, and the planner prices it.
"""

from functools import cache, lru_cache
from typing import Any

from megalite.config import Config, ModelConfig
from megalite.inventory.layers import model_layers
from megalite.inventory.memory_plan import DEFAULT_PLAN, MemoryPlan
from megalite.schedule import (
    ActivationRoom,
    Program,
    WeightChunks,
    build_program,
    delay_update,
    find_schedule,
    insert_transfers,
    insert_unshard,
    load_program,
    lower,
    merge_backward,
    partition,
    with_chunks,
)


def computations(
    config: Config,
    num_microbatches: int,
    schedule: str | None = None,
    *,
    plan: MemoryPlan = DEFAULT_PLAN,
    waits: bool = False,
) -> Program:
    """F, R, B, I, W, EVICT, PREFETCH and STEP of a batch as they run, without messages, reductions and gathers.

    schedule: instead of the configuration's. plan: whose rooms activations and weights keep to. waits: for the update
    before, although the configuration delays it. Raises ScheduleError.
    """
    parallel, delayed = config.parallel, config.optimizer.offload.delayed_parameter_update and not waits
    changes = delayed, plan.room, plan.chunks
    if parallel.pipeline_schedule_file is not None:
        return _changed(load_program(parallel.pipeline_schedule_file), *changes)
    ranks, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    shape = schedule or parallel.schedule, ranks, num_microbatches, chunks
    return _built(changes, *shape, **parallel.pipeline_shape)


@cache
def _built(changes: tuple[bool, ActivationRoom | None, WeightChunks | None], *shape: Any, **further: Any) -> Program:
    """One object for one shape, so that what is worked out of a program is found again."""
    return _changed(build_program(*shape, **further), *changes)


def _changed(program: Program, delayed: bool, room: ActivationRoom | None, chunks: WeightChunks | None) -> Program:
    """The program with what the configuration changes in it; activations move where they have to keep to some room, and
    weights where they live on the host."""
    program = merge_backward(program)
    program = delay_update(program) if delayed else program
    program = program if room is None else insert_transfers(program, room)
    return program if chunks is None else with_chunks(program, chunks)


def lowered_program(
    config: Config,
    num_microbatches: int,
    schedule: str | None = None,
    *,
    plan: MemoryPlan = DEFAULT_PLAN,
    waits: bool = False,
) -> Program:
    """The same with everything that an executor needs. Raises ScheduleError."""
    program = lower(computations(config, num_microbatches, schedule, plan=plan, waits=waits))
    if config.parallel.zero_stage == 3 and find_schedule(schedule or config.parallel.schedule).gathers_once:
        program = insert_unshard(program)  # a chunk's weights are gathered once a batch and direction
    return program


@lru_cache(maxsize=256)
def _forward_flops(model: ModelConfig) -> tuple[float, ...]:
    return tuple(float(layer.flops()) for layer in model_layers(model))


def stage_layer_ranges(config: Config, program: Program) -> list[range]:
    """Which layers each stage holds: indices into [embedding, block 0, ..., head]. Raises ScheduleError."""
    parallel = config.parallel
    return partition(
        config.model.num_layers,
        program.placement,
        costs=_forward_flops(config.model),
        first=parallel.stage_layout.decoder_first_pipeline_num_layers,
        last=parallel.stage_layout.decoder_last_pipeline_num_layers,
        layout=parallel.stage_layout.pipeline_model_parallel_layout,
    )
