"""The table that a run prints before its first step.

Plain arithmetic on the configuration, for which no torch is needed; `--dry-run` gives it what was read from a rank that
was built on `meta`.
"""

from collections.abc import Sequence
from dataclasses import replace

from megalite.config import Config, ModelConfig, StageLayout, has_delay
from megalite.inventory import (
    FLOPS_CONVENTION,
    MemoryPlan,
    count_active_parameters,
    count_parameters,
    count_trained_parameters,
    flops_per_iteration,
)
from megalite.planner.float8 import kept_bytes
from megalite.planner.hardware import available, load_hardware
from megalite.planner.memory import PlannedStages, RankMemory, moved, pipeline_memory, weights_moved
from megalite.planner.model_states import checkpoint_bytes
from megalite.progress import in_units
from megalite.schedule import Program, division_text


def startup_rows(run: PlannedStages, device: str = "CPU") -> list[tuple[str, str]]:
    """Rows (name, text) about model, layout, batch, length, FLOPs and memory. device: what the ranks run on, as
    text."""
    config, world_size, program, cuts = run.config, run.world_size, run.program, run.cuts
    model, training, parallel = config.model, config.training, config.parallel
    batch = config.global_batch_size(world_size)
    lengths = list(dict.fromkeys(length for length, _ in config.phases(world_size)))
    flops = [
        flops_per_iteration(
            config.at_length(s).model, batch * model.seq_length // s, parallel.tensor_model_parallel_size
        )
        for s in lengths
    ]
    ranks = pipeline_memory(replace(run, on_cpu=device.lower() == "cpu"))
    heaviest = max(range(len(ranks)), key=lambda r: ranks[r].total)
    held = sum(kept_bytes(config, cuts[stage]) for stage in run.stages_of(heaviest))
    in_float8 = float(program.weight_versions[heaviest] * held)
    by = "given" if parallel.stage_layout != StageLayout() else "divided by the FLOPs of their forwards"
    groups = f", {model.query_groups} key/value heads" if model.query_groups != model.num_attention_heads else ""
    return [
        (
            "model",
            f"{model.model_type}: {model.num_layers} layers, hidden {model.hidden_size}, "
            f"{model.num_attention_heads} heads of {model.head_dim}{groups}, ffn {model.ffn_size} {model.activation}, "
            f"sequence {model.seq_length:,}, vocabulary {model.vocab_size:,} (padded {config.padded_vocab_size():,})",
        ),
        ("parameters", _parameters(model)),
        *([("experts", _experts(model))] if model.experts.num_experts is not None else []),
        *_run_rows(config, world_size, device),
        *([("stages", f"{division_text(cuts, program.placement)} ({by})")] if len(cuts) > 1 else []),
        *([("lengths", _lengths(config, world_size))] if training.seq_length_schedule is not None else []),
        ("FLOPs", f"{', then '.join(in_units(each, 'FLOP') for each in flops)} per step ({FLOPS_CONVENTION})"),
        *embedding_rows(config),
        *_memory_rows(ranks, heaviest, device, in_float8),
        *budget_rows(config, program, ranks, run.plan),
    ]


def foreign_rows(
    run: PlannedStages,
    memory: Sequence[RankMemory],
    device: str,
    *,
    parameters: int,
    by_stage: Sequence[int],
    flops_per_sample: float,
) -> list[tuple[str, str]]:
    """The same rows about a module of the user's own. memory: of the ranks at each pipeline coordinate. parameters: of
    the module. by_stage: of each stage, tied ones in each that holds them."""
    config, world_size, layers = run.config, run.world_size, list(map(len, run.cuts))
    model, batch = config.model, config.global_batch_size(world_size)
    counts = f"{in_units(parameters)} ({parameters:,})"
    if len(by_stage) > 1:
        counts += f"; by stage {', '.join(in_units(count) for count in by_stage)}"
    sizes = " + ".join(map(str, layers))
    heaviest = max(range(len(memory)), key=lambda rank: memory[rank].total)
    return [
        (
            "model",
            f"{model.module.model_module}: {sum(layers)} traced layers{f' ({sizes})' if len(layers) > 1 else ''}, "
            f"sequence {model.seq_length:,}, vocabulary {model.vocab_size:,}",
        ),
        ("parameters", counts),
        *_run_rows(config, world_size, device),
        ("FLOPs", f"{in_units(flops_per_sample * batch, 'FLOP')} per step (counted in the traced module, x 3)"),
        *_memory_rows(memory, heaviest, device),
    ]


def _run_rows(config: Config, world_size: int, device: str) -> list[tuple[str, str]]:
    """Rows about what does not depend on the model."""
    training, seq_length = config.training, config.model.seq_length
    dp, batch = config.data_parallel_size(world_size), config.global_batch_size(world_size)
    iterations, samples = config.train_iterations(world_size), config.total_train_samples(world_size)
    number = config.num_microbatches(world_size)
    alike = f"on {dp} replica{'s' * (dp > 1)}"
    taken_by = "in turn on the replicas of each stage" if config.parallel.meshes else alike
    return [
        ("layout", f"{describe_layout(config, world_size)}, on {world_size} x {device}"),
        ("precision", _precision(config)),
        (
            "batch",
            f"{batch:,} samples = {number} micro-batch{'es' * (number != 1)} of {training.micro_batch_size} "
            f"{taken_by}; {in_units(batch * seq_length)} tokens per step",
        ),
        ("training", f"{iterations:,} iterations, {samples:,} samples, {in_units(samples * seq_length)} tokens"),
        *_local_rows(config, world_size),
        *(("data", f"from sample {first:,} {name}") for first, name in config.data.phases(seq_length)),
    ]


def _local_rows(config: Config, world_size: int) -> list[tuple[str, str]]:
    """What saves on the hosts themselves take: two of them while one is written."""
    local, state = config.checkpoint.local, 0 if config.model.is_foreign else checkpoint_bytes(config)
    if local.non_persistent_save_interval is None:
        return []
    every = f"every {local.non_persistent_save_interval:,} iterations in {local.folder} of each host"
    kind = "memory" if local.non_persistent_ckpt_type == "in_memory" else "disk"
    needed = in_units(2 * local.copies * state / world_size, "B")
    known = f"; {needed} of {kind} for each rank of a host" if state else ""
    return [("local saves", f"{every}, each file on {local.copies}{known}")]


def embedding_rows(config: Config) -> list[tuple[str, str]]:
    """Where the word embedding's rows are, with `--embedding-offload`."""
    given = config.optimizer.offload
    if given.embedding_offload is None:
        return []
    count = given.embedding_lookahead
    where = " of a rank of the first stage" if config.parallel.pipeline_model_parallel_size > 1 else ""
    ahead = f"those of {count} micro-batch{'es' * (count != 1)} come ahead"
    return [
        ("embedding", f"{config.embedding_rows:,} rows on the host{where}, {config.cached_rows:,} in a cache; {ahead}")
    ]


def _parameters(model: ModelConfig) -> str:
    total, active = count_parameters(model), count_active_parameters(model)
    text = f"{in_units(total)} ({total:,})"
    if (trained := count_trained_parameters(model)) != total:
        base = "; the matrices beside them in 8 bits" * model.lora.frozen_weights_int8
        adapters = model.lora.words(model.adapted_parts)
        return f"{text}, of which {in_units(trained)} ({trained:,}) are trained: {adapters}{base}"
    return text if active == total else f"{text}, of which a token meets {in_units(active)} ({active:,})"


def _experts(model: ModelConfig) -> str:
    given, sparse = model.experts, sum(model.sparse_layers)
    shared = given.moe_shared_expert_intermediate_size
    beside = f", one of width {shared} for all" if shared is not None else ""
    return (
        f"{given.num_experts} of width {model.expert_ffn_size} in {sparse} of {model.num_layers} blocks, "
        f"{given.moe_router_topk} a token{beside}"
    )


def _lengths(config: Config, world_size: int) -> str:
    """`4,096 tokens (8 sequences a sample) for 100 iterations, then 32,768 (1) for 20`."""
    parts = [
        f"{length:,} tokens ({config.model.seq_length // length:,} a sample) for {iterations:,} iterations"
        for length, iterations in config.phases(world_size)
    ]
    return ", then ".join(parts)


def format_table(rows: Sequence[tuple[str, str]]) -> str:
    """Align the rows, one a line."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f" {name:<{width}}  {text}" for name, text in rows)


def describe_layout(config: Config, world_size: int) -> str:
    """`tp2 x dp2, sequence parallel, ZeRO stage 1`."""
    parallel = config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "cp": parallel.context.context_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "dp": config.data_parallel_size(world_size),
        "ep": parallel.experts.expert_model_parallel_size,
    }
    parts = [" x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one process"]
    if parallel.grid is not None:
        parts.append(
            f"tp as a {parallel.tensor_grid.tensor_parallel_mode} grid of {' x '.join(map(str, parallel.grid))}"
        )
    if parallel.meshes:
        parts = [f"pp{sizes['pp']} of {parallel.stage_meshes} (tp x replicas)"]
    if sizes["pp"] > 1:
        chunks = f", {parallel.num_chunks} chunks per rank" if parallel.num_chunks > 1 else ""
        file = parallel.pipeline_schedule_file
        parts.append(f"schedule {parallel.schedule}{chunks}" if file is None else f"schedule of {file}")
    if parallel.pipeline_flush_steps:
        parts.append(f"the first {parallel.pipeline_flush_steps} iterations without delay (`pipeline_flush_steps`)")
    if config.optimizer.offload.delayed_parameter_update:
        parts.append("each update behind the next batch")
    if has_delay(config):
        parts.append(f"staleness correction {config.staleness}")
    if parallel.sequence_parallel and sizes["tp"] > 1:
        parts.append("sequence parallel")
    if parallel.zero_stage:
        less = f" ({parallel.zero_plus_plus})" if parallel.zero_plus_plus.on else ""
        parts.append(f"ZeRO stage {parallel.zero_stage}{less}")
    if parallel.hardware.cuda_graph_impl != "none":
        parts.append("blocks as CUDA graphs")
    return ", ".join(parts)


def _precision(config: Config) -> str:
    name, given, detail = config.training.precision.name, config.training.float8, ""
    if given.fp8_format is not None:
        detail = f" (linear layers of blocks: fp8 {given.fp8_format}, {given.fp8_recipe} scales)"
    elif name == "fp32":
        detail = f" (matrix products: {config.training.float32_matmul_precision})"
    if not config.training.precision.half:
        return name + detail
    gradients = name if config.parallel.grad_reduce_in_bf16 else "fp32"
    return f"{name}{detail}, master weights in fp32, gradients in {gradients}"


#: What the row about devices says of some, and of all, and the last line of `--dry-run` looks for.
TOO_SMALL = "too small for this layout"
NO_ROOM = "no known device has more"
PARTS = ("weights", "gradients", "optimizer", "activations", "boundary", "logits", "buffers", "workspace", "warm_up")
LARGEST = 3  # terms that are named beside devices that are too small


def _memory_rows(
    ranks: Sequence[RankMemory], heaviest: int, device: str, in_float8: float = 0.0
) -> list[tuple[str, str]]:
    """What the fullest rank needs; where the GPU is not known, also how much several kinds have for tensors, and which
    have too little. in_float8: of its weights."""
    memory = ranks[heaviest]
    held = {name: in_units(getattr(memory, name), "B") for name in (*PARTS, "host", "file") if getattr(memory, name)}
    if in_float8:
        held["weights"] += f" ({in_units(in_float8, 'B')} of them copies in fp8)"
    where = f" on the ranks of pipeline coordinate {heaviest}, the fullest" if len(ranks) > 1 else " on each rank"
    parts = ", ".join(f"{name} {amount}" for name, amount in held.items())
    rows = [("memory", f"{in_units(memory.total, 'B')}{where}: {parts}")]
    if device != "GPU":
        return rows
    known = [each for each in map(load_hardware, available()) if not each.on_cpu]
    rooms = {each.name: f"{each.name} {each.usable_bytes / 1e9:.3g}" for each in known}
    text = f"GB that tensors may use: {', '.join(rooms.values())}"
    if small := [each.name for each in known if each.usable_bytes < memory.total]:
        largest = sorted(PARTS, key=lambda name: -getattr(memory, name))[:LARGEST]
        terms = ", ".join(f"{name} {in_units(getattr(memory, name), 'B')}" for name in largest)
        text += f"; {TOO_SMALL}: {', '.join(small)} (largest: {terms})"
        text += f", {NO_ROOM}" * (len(small) == len(known))
    return [*rows, ("room", text)]


def budget_rows(
    config: Config, program: Program, ranks: Sequence[RankMemory], plan: MemoryPlan
) -> list[tuple[str, str]]:
    """What lies where under `--device-memory-budget-gb`, and where weights live on the host."""
    given, numbers = config.parallel.hardware.device_memory_budget_gb, [each.number for each in plan.recompute]
    rows = [] if program.chunks is None else [("weights", _weights_moved(program))]
    if given is None:
        return rows
    parts = [f"{in_units(1e9 * given, 'B')} a device, {in_units(max(rank.total for rank in ranks), 'B')} planned"]
    held = [moved(program, rank) for rank in range(program.num_ranks)] if program.room is not None else []
    device, host = (max((each[i] for each in held), default=0.0) for i in (0, 1))
    off = {"on its host": max(rank.host for rank in ranks) - host, "in a file": max(rank.file for rank in ranks)}
    if states := [f"{in_units(nbytes, 'B')} of a rank {where}" for where, nbytes in off.items() if nbytes > 0]:
        kinds = "masters and moments" if program.chunks is None else "weights, gradients, masters and moments"
        parts.append(f"{kinds}: {' and '.join(states)}")
    if any(numbers):
        all_of_them = plan.recompute[0].method == "uniform"
        again = "all layers" if all_of_them else f"{' '.join(map(str, numbers))} layers of the stages"
        parts.append(f"recomputed: {again}")
    if held:
        parts.append(
            f"activations: at most {in_units(device, 'B')} on a device and {in_units(host, 'B')} on its host, "
            f"{max(each.transfers for each in held)} transfers a batch"
        )
    return [*rows, ("budget", "; ".join(parts))]


def _weights_moved(program: Program) -> str:
    """What comes to the device of weights that live on the host, on the rank that holds most."""
    assert program.chunks is not None
    found = [weights_moved(program, rank) for rank in range(program.num_ranks)]
    rank, moves = max(enumerate(found), key=lambda item: item[1].peak)
    stages = {stage for stage, _ in program.placement.stages_of(rank)}
    whole = sum(sum(program.chunks.sizes[stage]) for stage in stages)
    back = sum(program.chunks.gradients[stage][0] for stage in stages)
    return (
        f"on the host, with gradients; at most {in_units(moves.peak, 'B')} of {in_units(whole, 'B')} on a device; for "
        f"{moves.transfers:,} of {moves.uses:,} uses a layer comes, one use ahead: "
        f"{in_units(moves.fetched / moves.microbatches, 'B')} a micro-batch and {in_units(back, 'B')} of gradients back"
    )
