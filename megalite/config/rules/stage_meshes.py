"""Rules of `--stage-meshes`: what it needs, and what does not go with stages that differ."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.root import Config
from megalite.config.rules.layout import meshes_near
from megalite.config.rules.text import CP, EP, VPP
from megalite.config.stage_meshes import parse_meshes
from megalite.errors import ConfigError

ALIKE = "drop it, or give stages of one size"


def stage_meshes(config: Config, world_size: int) -> Iterator[str]:
    """Do the meshes make up the world, and does the rest of the layout allow stages that differ?"""
    parallel, given = config.parallel, config.parallel.stage_meshes
    if given is None:
        return
    try:
        meshes = parse_meshes(given)
    except ConfigError as error:
        yield str(error)
        return
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
    parallel, log = config.parallel, config.logging
    switches = {
        "`expert_tensor_parallel_size`": parallel.experts.expert_tensor_parallel_size,
        "`pipeline_schedule_file`": parallel.pipeline_schedule_file,
        "`tp_comm_overlap`": parallel.tp_comm_overlap,
        "`model_module`": config.model.is_foreign,
        "`seq_length_schedule`": config.training.seq_length_schedule,
        "`param_offload`": config.optimizer.offload.param_offload == "cpu",
        "`mtp_num_layers`": config.model.further.depth,
        "`embedding_offload`": config.optimizer.offload.embedding_offload,
        "`device_memory_budget_gb`": parallel.hardware.device_memory_budget_gb,
    }
    tools = {
        "`sample_interval`": (log.samples.sample_interval, "generate_text.py continue texts from"),
        "`eval_task_files`": (log.eval_tasks.eval_task_files, "evaluate_harness.py measure"),
    }
    found = [(name, ALIKE) for name, value in switches.items() if value]
    found += [(name, f"drop it, and let tools/{text} checkpoints") for name, (value, text) in tools.items() if value]
    for name, instead in found if parallel.meshes else ():
        yield f"`stage_meshes`={parallel.stage_meshes}: not with {name}; {instead}"
