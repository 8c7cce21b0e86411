"""Rules of `--stage-meshes`: what it needs, and what does not go with stages that differ."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.root import Config
from megalite.config.rules.layout import batches_in_micro_batches
from megalite.config.rules.text import CP, EP, VPP, divisors
from megalite.config.stage_meshes import nearest_meshes, parse_meshes


def stage_meshes(config: Config, world_size: int) -> Iterator[str]:
    """Do the meshes make up the world, and does everything else allow stages that differ?"""
    parallel, given = config.parallel, config.parallel.stage_meshes
    if given is None:
        return
    try:
        meshes = parse_meshes(given)
    except ValueError as error:
        yield f"`stage_meshes`={given}: {error}"
        return
    flag, total = f"`stage_meshes`={given}", sum(mesh.size for mesh in meshes)
    if total != world_size:
        sizes = [count for count, _ in batches_in_micro_batches(config, world_size)]
        model = config.model
        tensor = [size for size in divisors(model.num_attention_heads) if model.legal_tensor_size(size)]
        legal = nearest_meshes(meshes, world_size, sizes, tensor)
        near = f", or one of {'; '.join(legal)}" if legal else ""
        yield f"{flag}: {total} ranks in all, the world has {world_size}; use `nprocs` {total}{near}"
    for excluded, instead in _excluded(config) if parallel.meshes else ():
        yield f"{flag}: not with {excluded}; {instead}"


def _excluded(config: Config) -> Iterator[tuple[str, str]]:
    """(What does not go with stages that differ, what to do)."""
    parallel, model = config.parallel, config.model
    alike = "drop it, or give stages of one size"
    sizes = {
        CP: parallel.context.context_parallel_size,
        EP: parallel.experts.expert_model_parallel_size,
        VPP: parallel.virtual_pipeline_model_parallel_size or 1,
        "`num_distributed_optimizer_instances`": parallel.num_distributed_optimizer_instances,
    }
    yield from ((f"{name}={size}", alike) for name, size in sizes.items() if size > 1)
    switches = {
        "`expert_tensor_parallel_size`": parallel.experts.expert_tensor_parallel_size,
        "`pipeline_schedule_file`": parallel.pipeline_schedule_file,
        "`tp_comm_overlap`": parallel.tp_comm_overlap,
        "`model_module`": model.is_foreign,
        "`seq_length_schedule`": config.training.seq_length_schedule,
        "`param_offload`": config.optimizer.offload.param_offload == "cpu",
        "`mtp_num_layers`": model.further.depth,
        "`embedding_offload`": config.optimizer.offload.embedding_offload,
        "`device_memory_budget_gb`": parallel.hardware.device_memory_budget_gb,
    }
    yield from ((name, alike) for name, value in switches.items() if value)
    if config.logging.samples.sample_interval is not None:
        yield "`sample_interval`", "drop it, and let tools/generate_text.py continue texts from checkpoints"
    if config.logging.eval_tasks.eval_task_files:
        yield "`eval_task_files`", "drop it, and let tools/evaluate_harness.py measure checkpoints"
