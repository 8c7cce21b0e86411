"""Rules of `--stage-meshes`: what it needs, and what does not go with stages that differ."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.root import Config
from megalite.config.rules.layout import meshes_near
from megalite.config.rules.text import CP, EP, VPP
from megalite.config.stage_meshes import parse_meshes

ALIKE = "drop it, or give stages of one size"


def stage_meshes(config: Config, world_size: int) -> Iterator[str]:
    """Do the meshes make up the world, and does the rest of the layout allow stages that differ?"""
    parallel, given = config.parallel, config.parallel.stage_meshes
    if given is None:
        return
    meshes = parse_meshes(given)
    flag, total = f"`stage_meshes`={given}", sum(mesh.size for mesh in meshes)
    if total != world_size:
        legal = meshes_near(config, meshes, world_size)
        near = f", or one of {legal}" if legal else ""
        yield f"{flag}: {total} ranks in all, the world has {world_size}; use `nprocs` {total}{near}"
    sizes = {
        CP: parallel.context.context_parallel_size,
        EP: parallel.experts.expert_model_parallel_size,
        VPP: parallel.virtual_pipeline_model_parallel_size or 1,
        "`num_distributed_optimizer_instances`": parallel.num_distributed_optimizer_instances,
    }
    for name, size in sizes.items() if parallel.meshes else ():
        if size > 1:
            yield f"{flag}: not with {name}={size}; {ALIKE}"


def training_stage_meshes(config: Config, world_size: int) -> Iterator[str]:
    """Does the training allow stages that differ?"""
    parallel, log, offload = config.parallel, config.logging, config.optimizer.offload
    fix = "drop it, and let tools/{} checkpoints"
    excluded = {
        "`expert_tensor_parallel_size`": (parallel.experts.expert_tensor_parallel_size, ALIKE),
        "`pipeline_schedule_file`": (parallel.pipeline_schedule_file, ALIKE),
        "`tp_comm_overlap`": (parallel.tp_comm_overlap, ALIKE),
        "`model_module`": (config.model.is_foreign, ALIKE),
        "`seq_length_schedule`": (config.training.seq_length_schedule, ALIKE),
        "`param_offload`": (offload.param_offload == "cpu", ALIKE),
        "`mtp_num_layers`": (config.model.further.depth, ALIKE),
        "`embedding_offload`": (offload.embedding_offload, ALIKE),
        "`device_memory_budget_gb`": (parallel.hardware.device_memory_budget_gb, ALIKE),
        "`sample_interval`": (log.samples.sample_interval, fix.format("generate_text.py continue texts from")),
        "`eval_task_files`": (log.eval_tasks.eval_task_files, fix.format("evaluate_harness.py measure")),
    }
    for name, (value, instead) in excluded.items() if parallel.meshes else ():
        if value:
            yield f"`stage_meshes`={parallel.stage_meshes}: not with {name}; {instead}"
