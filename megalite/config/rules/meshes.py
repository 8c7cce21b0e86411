"""Rules of ranks that form other shapes: stages that differ (`--stage-meshes`), grids of tensor-parallel ranks."""

import math
from collections.abc import Iterator

from megalite.config.parallel import grids_of
from megalite.config.root import Config
from megalite.config.rules.beside import excluded, is_on
from megalite.config.rules.layout import meshes_near
from megalite.config.rules.text import CP, EP, TP, VPP, divisors, listed, multiples_around
from megalite.config.stage_meshes import parse_meshes
from megalite.config.update_rules import OPTIMIZER_SPECS

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
    sizes = (CP, EP, VPP, "`num_distributed_optimizer_instances`")
    for name in sizes if parallel.meshes else ():
        if (size := config.given.get(name.strip("`"), 1)) > 1:
            yield f"{flag}: not with {name}={size}; {ALIKE}"


def training_stage_meshes(config: Config, world_size: int) -> Iterator[str]:
    """Does the training allow stages that differ?"""
    fix = "drop it, and let tools/{} checkpoints"
    alike = "expert_tensor_parallel_size pipeline_schedule_file tp_comm_overlap model_module seq_length_schedule"
    alike += " param_offload mtp_num_layers embedding_offload device_memory_budget_gb"
    instead_of = dict.fromkeys(alike.split(), ALIKE) | {
        "sample_interval": fix.format("generate_text.py continue texts from"),
        "eval_task_files": fix.format("evaluate_harness.py measure"),
    }
    for name, instead in instead_of.items() if config.parallel.meshes else ():
        if is_on(config, name):
            yield f"`stage_meshes`={config.parallel.stage_meshes}: not with `{name}`; {instead}"


def tensor_grid(config: Config, world_size: int) -> Iterator[str]:
    """Do the ranks make such a grid, and does it divide the model? What has no place in one."""
    given, ranks = config.parallel.tensor_grid, config.parallel.tensor_model_parallel_size
    mode, sides = given.tensor_parallel_mode, given.tensor_parallel_grid
    flag = f"`tensor_parallel_mode`={mode}"
    if sides is not None and mode != "4d":
        yield f"`tensor_parallel_grid`={','.join(map(str, sides))}: {flag} has a grid of its own; use 4d, or drop it"
    if mode == "1d":
        return
    reasons = {
        "sequence_parallel": "a grid splits all activations already",
        "tp_comm_overlap": "whose halves wait for other messages",
        "context_parallel_size": "which cuts sequences",
        "stage_meshes": "whose stages are cut along one side",
        "num_experts": "whose tokens travel",
        "model_module": "whose layers are its own",
        "multi_latent_attention experimental_attention_variant": "whose layers are cut along one side",
        "mtp_num_layers lora_rank": "whose layers are cut along one side",
        "qk_layernorm_across_heads": "which is cut along one side",
        "qk_clip": "which looks at all queries",
        "fp8_format": "whose scales are of matrices cut along one side",
        "compile": "whose norms send nothing",
        "partial_backprop_groups": "which counts whole micro-batches",
        "embedding_offload": "whose rows are on one host",
        "loss_by_part": "which looks at all tokens of a micro-batch",
        "sample_interval": "which generates with layers cut along one side",
        "eval_task_files": "which scores with layers cut along one side",
    }
    spec = OPTIMIZER_SPECS[config.optimizer.optimizer]
    if spec.whole or spec.statistics:
        yield f"{flag}: not with `optimizer`={config.optimizer.optimizer}, which needs whole rows; use adam or sgd"
    if config.model.softmax_type == "learnable":
        reasons["softmax_type"] = "whose sinks are cut along one side"
    yield from excluded(config, flag, reasons)
    if (shape := given.shape(ranks)) is None:
        if mode == "4d" and (sides is None or len(sides) != 3):
            yield f"{flag}: needs `tensor_parallel_grid` with three numbers, such as 1 2 {max(1, ranks // 2)}"
        elif mode == "4d":
            product = " x ".join(map(str, sides or ()))
            yield f"`tensor_parallel_grid`: {product} = {math.prod(sides or ())} ranks, not {TP}={ranks}; use as many"
        else:
            legal = listed(sorted({math.prod(shape) for shape in grids_of(mode, max(64, 2 * ranks))}))
            yield f"{TP}={ranks}: {flag} has grids of {legal} ranks; use one of them, or 4d with a grid of your own"
        return
    yield from _divides(config, flag, shape)


def _divides(config: Config, flag: str, shape: tuple[int, int, int]) -> Iterator[str]:
    model, (x, y, z) = config.model, shape
    wide, grid = x * y, f"a grid of {x} x {y} x {z}"
    if wide == 1:
        yield f"{flag}: {grid} cuts no features, as data parallelism does; drop it for `zero_stage`, or widen the grid"
    if model.query_groups % wide:
        legal = listed(divisors(model.query_groups))
        yield (
            f"{flag}: {grid} shares heads over {wide}, which does not divide {model.query_groups} groups of queries; "
            f"legal: {legal}"
        )
    sizes = {"seq_length": model.seq_length, "hidden_size": model.hidden_size, "ffn_hidden_size": model.ffn_size}
    shared = [("micro_batch_size", config.training.micro_batch_size, z, f"{grid} that share samples")]
    for name, size, ranks, which in shared + [(name, size, wide * z, grid) for name, size in sizes.items()]:
        if size % ranks:
            near = multiples_around(size, ranks)
            yield f"`{name}`={size}: not divisible by the {ranks} ranks of {which}; use {near}"
