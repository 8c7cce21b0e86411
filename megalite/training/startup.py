"""The table that a run prints before its first step, and the memory estimate in it.

Plain arithmetic on the configuration: `--dry-run` prints the same table without a rank being started, and no torch is
needed. Bytes per parameter with Adam over N data-parallel shards (ZeRO, arXiv 1910.02054):

    stage                        0          1            2            3
    bf16, fp32 main gradients    18         6 + 12/N     2 + 16/N     18/N
    fp32                         16         8 + 8/N      4 + 12/N     16/N

A schedule that keeps several weight versions adds one compute copy for each beyond the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config import Config
from megalite.config.arithmetic import FLOPS_CONVENTION, count_parameters, flops_per_iteration, parameter_shapes
from megalite.schedule import Program

__all__ = ["MemoryEstimate", "estimate_memory", "format_table", "in_units", "start_up_table"]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank. Not in it: what the libraries themselves take, transient buckets and gathered layers."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """All of it together."""
        return self.weights + self.gradients + self.optimizer + self.activations


def start_up_table(
    config: Config, world_size: int, *, program: Program, cuts: Sequence[range], device: str = "cpu"
) -> list[tuple[str, str]]:
    """Rows (name, text) about model, layout, batch, length, FLOPs and memory.

    Args:
        config: with its vocabulary resolved.
        program: schedule of a full batch. cuts: stage -> indices into [embedding, block 0, ..., head].
        device: what the ranks run on, in words.
    """
    model, training, parallel = config.model, config.training, config.parallel
    dp = config.data_parallel_size(world_size)
    batch = config.global_batch_size(world_size)
    iterations, samples = config.train_iterations(world_size), config.total_train_samples(world_size)
    flops = flops_per_iteration(model, batch, parallel.tensor_model_parallel_size)
    ranks = [estimate_memory(config, world_size, program=program, cuts=cuts, rank=r) for r in range(program.num_ranks)]
    heaviest = max(range(len(ranks)), key=lambda r: ranks[r].total)
    groups = f", {model.query_groups} key/value heads" if model.query_groups != model.num_attention_heads else ""
    return [
        (
            "model",
            f"{model.model_type}: {model.num_layers} layers, hidden {model.hidden_size}, "
            f"{model.num_attention_heads} heads of {model.head_dim}{groups}, ffn {model.ffn_size} {model.activation}, "
            f"sequence {model.seq_length:,}, vocabulary {model.vocab_size:,} (padded {config.padded_vocab_size():,})",
        ),
        ("parameters", f"{in_units(count_parameters(model))} ({count_parameters(model):,})"),
        ("layout", _layout(config, world_size, device)),
        ("precision", _precision(config)),
        (
            "batch",
            f"{batch:,} samples = {config.num_microbatches(world_size)} micro-batches of {training.micro_batch_size} "
            f"on {dp} replica{'s' * (dp > 1)}; {in_units(batch * model.seq_length)} tokens per step",
        ),
        (
            "training",
            f"{iterations:,} iterations, {samples:,} samples, {in_units(samples * model.seq_length)} tokens",
        ),
        ("FLOPs", f"{in_units(flops, 'FLOP')} per step ({FLOPS_CONVENTION})"),
        ("memory", _memory_line(ranks[heaviest], heaviest, len(ranks))),
    ]


def format_table(rows: Sequence[tuple[str, str]]) -> str:
    """Align the rows, one a line."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f" {name:<{width}}  {text}" for name, text in rows)


def estimate_memory(
    config: Config, world_size: int, *, program: Program, cuts: Sequence[range], rank: int
) -> MemoryEstimate:
    """Estimate the bytes of a rank at pipeline coordinate `rank` while it trains."""
    parallel, training = config.parallel, config.training
    shards = max(1, config.data_parallel_size(world_size) // parallel.num_distributed_optimizer_instances)
    stages = program.placement.stages_of(rank)
    sizes = _layer_sizes(config)
    parameters = sum(sizes[i] for stage, _ in stages for i in cuts[stage]) / parallel.tensor_model_parallel_size
    compute, wide = (8, 8) if training.fp64 else (2, 4) if training.bf16 or training.fp16 else (4, 4)
    gradient = compute if parallel.grad_reduce_in_bf16 else wide
    state = _moment_bytes(config) + (wide if compute != wide else 0)
    zero = parallel.zero_stage
    versions = program.weight_versions[rank]
    peak = program.peak_activations[rank]
    chunk_layers = max(sum(_is_block(config, i) for i in cuts[stage]) for stage, _ in stages)
    return MemoryEstimate(
        weights=parameters * compute * (versions if zero < 3 else versions / shards),
        gradients=parameters * gradient / (shards if zero >= 2 else 1),
        optimizer=parameters * state / (shards if zero >= 1 else 1) * _share_on_device(config),
        activations=(peak.full + peak.weight_only) * _chunk_activations(config, chunk_layers, compute),
    )


def _moment_bytes(config: Config) -> int:
    """Bytes of optimizer state per parameter, the master weight not counted."""
    optimizer, wide = config.optimizer, 8 if config.training.fp64 else 4
    first = wide if optimizer.exp_avg_dtype == "fp32" else 2
    second = wide if optimizer.exp_avg_sq_dtype == "fp32" else 2
    # muon leaves embeddings to AdamW: their second moment is too little to count
    sizes = {"adam": first + second, "sgd": wide * (optimizer.sgd_momentum > 0), "lion": first, "muon": wide}
    return sizes[optimizer.optimizer]


def _share_on_device(config: Config) -> float:
    """The part of masters and moments that is not in host memory."""
    optimizer = config.optimizer
    return 1 - optimizer.optimizer_offload_fraction * optimizer.optimizer_cpu_offload


def _is_block(config: Config, index: int) -> bool:
    return 0 < index <= config.model.num_layers


def _layer_sizes(config: Config) -> list[int]:
    """Elements in memory of [embedding, block 0, ..., head], a tied head's copy of the embedding left out."""
    model = config.model
    sizes = [0] * (model.num_layers + 2)
    padding = config.padded_vocab_size() - model.vocab_size
    for name, shape in parameter_shapes(model).items():
        first, *rest = name.split(".")
        index = {"embedding": 0, "head": -1}.get(first, int(rest[0]) + 1 if first == "layers" else 0)
        elements = 1
        for extent in shape:
            elements *= extent
        if name in ("embedding.word_embeddings.weight", "head.output.weight"):
            elements += padding * model.hidden_size
        sizes[index] += elements
    return sizes


def _chunk_activations(config: Config, layers: int, element_bytes: int) -> float:
    """Bytes that `layers` blocks keep for the backward of one micro-batch, fused attention assumed."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    tokens = model.seq_length * config.training.micro_batch_size
    outer = tp if config.parallel.sequence_parallel else 1
    rotated = model.query_size + model.kv_size if model.position_embedding_type == "rope" else 0
    inner = 2 * model.query_size + 2 * model.kv_size + rotated + (3 if model.gated else 2) * model.ffn_size
    block = tokens * (4 * model.hidden_size / outer + inner / tp) * element_bytes
    if model.recompute_granularity != "full":
        return layers * block
    kept = tokens * model.hidden_size / outer * element_bytes
    number = min(layers, model.recompute_num_layers or 1)
    if model.recompute_method == "block":
        return number * kept + (layers - number) * block
    return -(-layers // number) * kept + number * block


def _layout(config: Config, world_size: int, device: str) -> str:
    parallel = config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "dp": config.data_parallel_size(world_size),
    }
    parts = [" x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one process"]
    if sizes["pp"] > 1:
        chunks = f", {parallel.num_chunks} chunks per rank" if parallel.num_chunks > 1 else ""
        parts.append(f"schedule {parallel.schedule}{chunks}")
    if parallel.sequence_parallel and sizes["tp"] > 1:
        parts.append("sequence parallel")
    if parallel.zero_stage:
        parts.append(f"ZeRO stage {parallel.zero_stage}")
    return ", ".join([*parts, f"on {world_size} x {device}"])


def _precision(config: Config) -> str:
    training = config.training
    if training.fp64:
        return "fp64"
    if not (training.bf16 or training.fp16):
        return f"fp32 (matrix products: {training.float32_matmul_precision})"
    name = "bf16" if training.bf16 else "fp16"
    return f"{name}, master weights in fp32, gradients in {name if config.parallel.grad_reduce_in_bf16 else 'fp32'}"


def _memory_line(memory: MemoryEstimate, rank: int, num_ranks: int) -> str:
    parts = [f"{name} {in_units(getattr(memory, name), 'B')}" for name in ("weights", "gradients", "optimizer")]
    where = f" on the ranks of pipeline coordinate {rank}, the fullest" if num_ranks > 1 else " on each rank"
    parts.append(f"activations about {in_units(memory.activations, 'B')}")
    return f"{in_units(memory.total, 'B')}{where}: {', '.join(parts)}"


def in_units(number: float, unit: str = "") -> str:
    """1234567 and `B` -> `1.23 MB`, with the prefixes k, M, G, T, P."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 1000 or prefix == "P":
            break
        number /= 1000
    return f"{number:.3g} {prefix}{unit}".rstrip()
