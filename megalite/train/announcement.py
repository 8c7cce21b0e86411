"""What a run says and checks before anything of the model's size is allocated: the table, advice, memory."""

from __future__ import annotations

import logging

import torch

from megalite.comm import Axis, ParallelMesh, World, all_gather_json
from megalite.config import Config
from megalite.errors import ConfigError
from megalite.inventory import stage_layer_ranges
from megalite.nn import NARROWEST_HEAD, use_newer_kernel
from megalite.parallel.pipeline import Executor, PipelineTracer
from megalite.parallel.tensor import check_float8
from megalite.planner import foreign_rows, format_table, startup_rows
from megalite.schedule import Program, division_text
from megalite.train.build import parameter_dtype
from megalite.train.foreign import ForeignModel
from megalite.train.memory_check import check_memory
from megalite.train.planned import PlannedRun

logger = logging.getLogger(__name__)


def open_module(config: Config, mesh: ParallelMesh, program: Program, world: World) -> ForeignModel:
    """The module of `--model-module`, traced and cut. Rank 0 asks whether it reads later tokens. Collective, all ranks.
    Raises ConfigError."""
    world.report_phase("start-up: the user's module")
    cp = mesh.context(gathers=config.parallel.context.cp_comm_type == "all_gather")
    dtype, first = parameter_dtype(config), world.is_first
    found = ForeignModel(config, mesh["tp"], program, world.device, dtype, cp=cp, probe=first)
    leak = next(filter(None, all_gather_json(found.leak, mesh.world)), None)
    if leak is not None:
        raise ConfigError(
            f"`model_module`={found.name}: reads later tokens: another last token moves the logits before it ({leak}); "
            "each may depend on earlier tokens only (is_causal=True in attention)"
        )
    return found


def announce(run: PlannedRun, world: World, axis: Axis) -> None:
    """Prints the table and what is slow here; refuses what cannot fit. Collective over `axis`, all ranks. Raises
    ConfigError."""
    if world.is_first:
        table = format_table(rows_of(run, "CPU" if run.on_cpu else torch.cuda.get_device_name(world.device)))
        logger.info("%s", table.removeprefix(" "))  # each line that is logged begins with a space
        for line in device_advice(run.config, world.device):
            logger.warning(line)
    check_float8(run.config, world.device)
    use_newer_kernel(world.device, parameter_dtype(run.config))
    check_memory(run, world, axis)


def make_tracer(config: Config, program: Program, executor: Executor, mesh: ParallelMesh) -> PipelineTracer | None:
    """What draws the timeline of the pipeline, if it is asked for."""
    if (path := config.logging.trace_pipeline) is None:
        return None
    known = not config.model.is_foreign and program.num_stages > 1
    division = division_text(stage_layer_ranges(config, program), program.placement) if known else ""
    return PipelineTracer(path, executor, mesh, config.train_iterations(mesh.size("world")), division)


def rows_of(run: PlannedRun, device: str) -> list[tuple[str, str]]:
    """The rows of the table. device: what the ranks run on, as text."""
    if run.foreign is None:
        return startup_rows(run, device)
    every = range(len(run.cuts))
    return foreign_rows(
        run.config,
        run.world_size,
        layers=[len(items) for items in run.cuts],
        parameters=run.foreign.count(every),
        by_stage=[run.foreign.count([stage]) for stage in every],
        flops_per_sample=run.foreign.flops_per_sample,
        memory=run.memory,
        device=device,
    )


def device_advice(config: Config, device: torch.device) -> list[str]:
    """What is legal but slow on this device."""
    model, advice = config.model, []
    if device.type == "cuda" and model.hidden_dropout > 0 and not config.training.compile:
        advice += [f"`hidden_dropout`={model.hidden_dropout}: some 80 kernels a place without `compile`, one with it"]
    if device.type == "cuda" and model.attention_dropout > 0:
        given = f"`attention_dropout`={model.attention_dropout}: "
        if config.training.precision.fp64 or model.kernel_dim < NARROWEST_HEAD:
            number = -(-model.seq_length // 64)
            given += f"attention of a layer is up to {number:,} tiles, dozens of launches each, for one kernel"
        else:
            given += "attention is computed twice, with and without the weights that are dropped"
        advice.append(given)
    return advice
