"""A user's configuration made small, with everything kept that composes: the layout, the schedule, what is recomputed,
sharded, dropped out, tied, clipped. What tests/equivalence draws at random is here one run's own.

    hidden 4096, 80 layers, 8192 tokens, 1024 ranks   ->   hidden 64, one layer a stage, 16 tokens, at most 64 ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megalite.config import (
    OWN_PATTERNS,
    BatchRamp,
    CheckpointConfig,
    Config,
    DataConfig,
    Experts,
    Float8,
    LoggingConfig,
    ModelConfig,
    OptimizerArgs,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    Spikes,
    StageLayout,
    TrainingLength,
    config_problems,
    has_delay,
    show,
)
from megalite.errors import ConfigError
from megalite.proof.branches import Branches, is_delayed, with_schedules
from megalite.schedule import find_schedule

VOCABULARY, TOKENS, HEAD = 61, 16, 8
EPSILON, EPSILON_IN_BASES = 1e-6, 1e-4
"""In bases of its own a matrix has whole directions whose gradient is rounding: in fp32 1e-8 of the others."""


@dataclass(frozen=True)
class Small:
    """config: what is run here, in fp64. own: the same in the user's number format, None where that is fp64.
    world_size: its ranks. changes: what was made smaller or left out, a line each. branches: what else it is asked for.
    """

    config: Config
    own: Config | None
    world_size: int
    changes: list[str]
    branches: Branches = Branches()

    @property
    def stale(self) -> bool:
        """Whether gradients are those of older weights (2BW, PipeDream)."""
        return find_schedule(self.config.parallel.schedule).asynchronous

    @property
    def by_microbatch(self) -> bool:
        """Whether each stage steps after every micro-batch (PipeDream)."""
        return find_schedule(self.config.parallel.schedule).update_per_microbatch


def shrink(config: Config, world_size: int, *, steps: int, most_ranks: int) -> Small:
    """The small configuration. Raises ConfigError where no legal one has so few ranks."""
    parallel, changes, branches = config.parallel, _Changes(), Branches.of(config, steps)
    if is_delayed(config) and steps < 4:
        raise ConfigError(
            f"--steps={steps}: the first late gradient is that of iteration 2, and half of the iterations, after which "
            "the checkpoint is taken, must have come to it; give --steps=4"
        )
    dp = _replicas(config, world_size, most_ranks)
    whole, world_size = world_size, dp * parallel.model_parallel_size
    changes.note("ranks", whole, world_size)
    model, own = _model(config, changes), config.training.seq_length_schedule
    training = replace(
        config.training,
        micro_batch_size=1 if config.training.float8.fp8_format else min(config.training.micro_batch_size, 2),
        float8=_float8(config, changes),
        batch_ramp=BatchRamp(),
        seq_length_schedule=None if own is None else f"0:{model.seq_length // 2} 1:{model.seq_length}",
        length=TrainingLength(train_iters=steps),
        nonfinite="skip" if branches.skipped else "stop",
        spikes=Spikes(),
        partial_backprop_groups=1,
        precision=Precision(fp64=True),
        loss_scaling=type(config.training.loss_scaling)(),
        float32_matmul_precision="highest",
        compile=False,
        eval_interval=None,
        eval_iters=0,
        full_validation=False,
        exit_interval=None,
        exit_duration_in_mins=None,
        iterations_to_skip=(),
        skip_train=False,
        dry_run=False,
    )
    if config.training.compile:
        changes.lines.append("--compile: left out")
    if config.parallel.hardware.cuda_graph_impl != "none":
        changes.lines.append("--cuda-graph-impl: left out, a CPU has no CUDA graphs")
    if config.training.spikes.on_spike is not None:
        changes.lines.append("--spikes: left out, a few iterations fill no window")
    if config.training.partial_backprop_groups > 1:
        changes.lines.append("--partial-backprop-groups: left out, whose gradients are those of a layout")
    if config.parallel.zero_plus_plus.rounds:
        changes.lines.append("--zero-plus-plus weights, gradients: left out, which round what one process does not")
    small = Config(
        model=model,
        parallel=_parallel(parallel, changes),
        training=training,
        optimizer=_optimizer(config, model.hidden_size / config.model.hidden_size, changes),
        data=made_data(config).data,
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(),
    )
    small = _with_batches(small, config, max(1, config.num_microbatches(whole)), world_size, changes)
    small = with_schedules(small, config, whole, world_size, branches, steps)
    return Small(small, _in_own_format(small, config), world_size, changes.lines, branches)


def made_data(config: Config) -> Config:
    """The configuration with generated data, cut and masked alike, so that no file is needed."""
    data = config.data
    made = DataConfig(
        mock_data=True,
        tokenizer_type="NullTokenizer",
        num_workers=0,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )
    model = replace(config.model, vocab_size=config.model.vocab_size or VOCABULARY)
    parallel = replace(config.parallel, nprocs=None)
    return replace(config, data=made, model=model, parallel=parallel, checkpoint=CheckpointConfig())


def _float8(config: Config, changes: _Changes) -> Float8:
    """The products' format. One process computes sample by sample, and blocks of 128 would not fit a small model."""
    given = config.training.float8
    if given.fp8_recipe not in ("blockwise", "mxfp8"):
        return given
    changes.note("--fp8-recipe", given.fp8_recipe, "rowwise")
    return replace(given, fp8_recipe="rowwise")


class _Changes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, name: str, before: object, after: object) -> None:
        if before != after:
            self.lines.append(f"{name}: {show(before)} -> {show(after)}")

    def fields(self, before: Any, after: Any) -> None:
        for name, value in vars(after).items():
            if getattr(before, name) != value and not hasattr(value, "__dict__"):
                self.note("--" + name.replace("_", "-"), getattr(before, name), value)


def _replicas(config: Config, world_size: int, most_ranks: int) -> int:
    """Data-parallel size: the user's, or the smallest that still has replicas of what it has."""
    parallel = config.parallel
    dp, one = config.data_parallel_size(world_size), parallel.model_parallel_size
    if dp * one <= most_ranks:
        return dp
    instances = parallel.num_distributed_optimizer_instances
    fewest = min(dp, 2 * instances if instances > 1 else 2)
    if fewest * one > most_ranks:
        sizes = {
            "--tensor-model-parallel-size": parallel.tensor_model_parallel_size,
            "--context-parallel-size": parallel.context.context_parallel_size,
            "--pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
        }
        largest = max(sizes, key=lambda flag: sizes[flag])
        helps = one > 1 and most_ranks >= max(2, fewest)  # what a smaller one frees are replicas
        fewer = f", or prove a layout with a smaller {largest}" if helps else ""
        replicas = f"{fewest} {'replica' if fewest == 1 else 'replicas'}"
        raise ConfigError(
            f"--max-ranks={most_ranks}: tensor x context x pipeline = {one} and at least {replicas} are "
            f"{fewest * one} ranks; give --max-ranks={fewest * one}{fewer}"
        )
    return next(n for n in range(most_ranks // one, 0, -1) if n % instances == 0 and n <= dp)


def _model(config: Config, changes: _Changes) -> ModelConfig:
    model, context = config.model, config.parallel.context
    tp = config.parallel.tensor_model_parallel_size * context.traders  # ranks among which groups are dealt out
    many = model.num_attention_heads // tp > 1
    groups, heads = None, tp * (2 if many else 1)
    if model.query_groups < model.num_attention_heads:
        groups = tp * (2 if model.query_groups // tp > 1 else 1) if model.query_groups >= tp else model.query_groups
        heads = groups * 2 if groups >= tp else heads  # neighbours share keys
    odd = model.kv_channels is not None and model.kv_channels * model.num_attention_heads != model.hidden_size
    hidden = heads * HEAD + (HEAD if odd else 0)
    rotated = int(HEAD * model.rotary_percent)
    unit = tp * context.ring * (2 if context.ring > 1 else 1)
    unit *= 1 if config.training.seq_length_schedule is None else 2
    tokens = unit * -(-TOKENS // unit)
    longer = model.max_position_embeddings is not None and model.max_position_embeddings > model.seq_length
    window = model.window_size
    if window is not None:
        window = 6 if window < model.seq_length else 2 * tokens
    scaling = model.rope_scaling
    if scaling.use_rope_scaling:
        scaling = replace(scaling, rope_scaling_original_length=TOKENS // 2)
    fixed = model.ffn_hidden_size is not None or model.gated
    layers = _layers(config)
    small = replace(
        model,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=2 * heads * HEAD if fixed else None,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=HEAD if odd else None,
        seq_length=tokens,
        max_position_embeddings=tokens + 8 if longer else None,
        rotary_percent=model.rotary_percent if rotated >= 2 and rotated % 2 == 0 else 0.5,
        rope_scaling=scaling,
        window_size=window,
        **_patterns(layers, model),
        init_method_std=max(model.init_method_std, 0.02),
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=min(model.make_vocab_size_divisible_by, 8),
        experts=_experts(config, _layers(config)),
    )
    changes.fields(model, small)
    changes.fields(model.experts, small.experts)
    return small


def _experts(config: Config, layers: int) -> Experts:
    """Fewer and narrower ones; balanced by sequence, which does not depend on what a micro-batch is."""
    given, parallel = config.model.experts, config.parallel
    if given.num_experts is None:
        return given
    number, ep = given.num_experts, parallel.experts.expert_model_parallel_size
    if given.moe_router_num_groups is None and number > 8:
        number = min(number, ep * -(-max(8, given.moe_router_topk + 1) // ep))
    width, shared = given.moe_ffn_hidden_size, given.moe_shared_expert_intermediate_size
    unit = HEAD * parallel.tensor_model_parallel_size
    whole = given.moe_router_load_balancing_type == "aux_loss"
    mixed = "[" in given.moe_layer_freq and layers != config.model.num_layers
    return replace(
        given,
        num_experts=number,
        moe_ffn_hidden_size=None if width is None else unit,
        moe_shared_expert_intermediate_size=None if shared is None else unit,
        moe_router_load_balancing_type="seq_aux_loss" if whole else given.moe_router_load_balancing_type,
        moe_layer_freq="2" if mixed else given.moe_layer_freq,
    )


def _patterns(layers: int, model: ModelConfig) -> dict[str, Any]:
    """The first layers of every pattern, of both kinds."""

    def first_of(name: str) -> str:
        *first, last = (model.listed(name, index) for index in range(layers))
        return ",".join(str(int(kind)) for kind in (*first, last if len({*first, last}) == 2 else not last))

    found: dict[str, Any] = {name: first_of(name) for name in OWN_PATTERNS if getattr(model, name) is not None}
    if model.delta.linear_attention_freq is not None:
        found["delta"] = replace(model.delta, linear_attention_freq=first_of("linear_attention_freq"))
    return found


def _layers(config: Config) -> int:
    """A layer a stage (and one more where the user's do not come out even), or all where stages are written out."""
    model, parallel = config.model, config.parallel
    stages = parallel.pipeline_model_parallel_size * parallel.num_chunks
    laid_out = parallel.stage_layout != StageLayout() or parallel.pipeline_schedule_file is not None
    several = model.recompute_granularity == "full" or model.cpu_offloading_num_layers
    if laid_out or len(model.recompute_num_layers or ()) > 1:
        return model.num_layers
    wanted = stages * (2 if several else 1) + (1 if model.num_layers % stages else 0)
    return min(model.num_layers, max(wanted, 2, model.cpu_offloading_num_layers))


def _parallel(parallel: ParallelConfig, changes: _Changes) -> ParallelConfig:
    flushed = min(parallel.pipeline_flush_steps, 1)
    changes.note("--pipeline-flush-steps", parallel.pipeline_flush_steps, flushed)
    return replace(
        parallel,
        ddp_bucket_size=None if parallel.ddp_bucket_size is None else 3000,
        grad_reduce_in_bf16=False,
        zero_plus_plus=replace(parallel.zero_plus_plus, zero_quantized_weights=False, zero_quantized_gradients=False),
        nprocs=None,
        pipeline_flush_steps=flushed,
        hardware=replace(parallel.hardware, device="cpu", distributed_backend=None, cuda_graph_impl="none"),
        distributed_timeout_minutes=10.0,
    )


def _optimizer(config: Config, smaller: float, changes: _Changes) -> OptimizerConfig:
    """Numbers at which a mistake shows and rounding does not. smaller: small / own hidden size."""
    settings, staleness = config.optimizer, config.optimizer.staleness
    if has_delay(config):  # what is unset follows from fields that are made smaller here
        staleness = replace(staleness, staleness_correction=config.staleness.method)
    final = settings.lr_wsd_decay
    if settings.lr_decay_style == "WSD":
        final = replace(final, lr_wsd_decay_iters=1, lr_wsd_decay_samples=None)
    return replace(
        settings,
        lr_decay=type(settings.lr_decay)(),
        lr_warmup=type(settings.lr_warmup)(),
        lr_wsd_decay=final,
        args=_arguments(settings, smaller, changes),
        exp_avg_dtype="fp32",
        exp_avg_sq_dtype="fp32",
        optimizer_impl="torch",
        store_param_remainders=False,
        staleness=staleness,
    )


def _arguments(settings: OptimizerConfig, smaller: float, changes: _Changes) -> OptimizerArgs:
    """Epsilons below which rounding makes differences; bases and roots are new in every step, long sides stay long."""
    args = settings.args
    small = replace(
        args,
        adam_eps=max(args.adam_eps, EPSILON),
        soap_eps=max(args.soap_eps, EPSILON_IN_BASES),
        soap_precondition_frequency=1,
        soap_max_precond_dim=int(args.soap_max_precond_dim * smaller),
        shampoo_eps=max(args.shampoo_eps, EPSILON),
        shampoo_matrix_eps=max(args.shampoo_matrix_eps, EPSILON_IN_BASES),
        shampoo_precondition_frequency=1,
        shampoo_max_precond_dim=max(1, int(args.shampoo_max_precond_dim * smaller)),
    )
    read = {n: v for n, v in vars(small).items() if n.startswith(("adam_", f"{settings.optimizer}_"))}
    small = replace(args, **read)
    changes.fields(args, small)
    return small


def _with_batches(small: Config, own: Config, most: int, world_size: int, changes: _Changes) -> Config:
    """With the fewest micro-batches above the number of ranks that the schedule takes, and a growing batch if the
    user's grows."""
    ranks = small.parallel.pipeline_model_parallel_size
    dp = small.data_parallel_size(world_size)
    unit = small.training.micro_batch_size * dp
    wanted = min(most, ranks + 2)
    for m in [*range(wanted, wanted + 4 * ranks + 8), most]:
        for training in _batches(small, own, unit, m):
            config = replace(small, training=training)
            if not config_problems(config, world_size):
                changes.note("micro-batches", most, m)
                return config
    config = replace(small, training=next(iter(_batches(small, own, unit, wanted))))
    raise ConfigError(
        [f"no small form of this configuration is legal: {line}" for line in config_problems(config, world_size)]
    )


def _batches(small: Config, own: Config, unit: int, m: int) -> Iterator[Any]:
    """Training sections of `m` micro-batches, growing ones first where the user's batch grows."""
    full, ramp = m * unit, own.training.batch_ramp
    for first in range(m - 1, 0, -1):
        start = first * unit
        if ramp.rampup_batch_size is not None:
            grown = BatchRamp(rampup_batch_size=(start, full - start, 2 * start))
            yield replace(small.training, global_batch_size=full, batch_ramp=grown)
        if ramp.step_batch_size_schedule is not None:
            text = f"0:{start} {2 * start * small.model.seq_length}:{full}"
            yield replace(small.training, global_batch_size=None, batch_ramp=BatchRamp(step_batch_size_schedule=text))
    if ramp == BatchRamp() or m == 1:
        yield replace(small.training, global_batch_size=full)


def _in_own_format(small: Config, own: Config) -> Config | None:
    """The small configuration with the user's precision path (bf16 or fp16, moments, remainders, reduction)."""
    if own.training.precision.fp64:
        return None
    scaling = own.training.loss_scaling
    if own.training.precision.fp16:  # a scale at which the first updates are skipped
        scaling = replace(scaling, initial_loss_scale=2.0**22, min_loss_scale=min(scaling.min_loss_scale, 1.0))
    theirs = own.optimizer
    optimizer = replace(
        small.optimizer,
        exp_avg_dtype=theirs.exp_avg_dtype,
        exp_avg_sq_dtype=theirs.exp_avg_sq_dtype,
        store_param_remainders=theirs.store_param_remainders,
    )
    return replace(
        small,
        parallel=replace(small.parallel, grad_reduce_in_bf16=own.parallel.grad_reduce_in_bf16),
        training=replace(small.training, precision=own.training.precision, loss_scaling=scaling),
        optimizer=optimizer,
    )
