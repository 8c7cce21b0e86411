"""The rules that tie fields together, one function a topic; each returns its problems, one line each.

A rule may assume that every field alone is within its bounds; it may not assume that other rules hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from megalite import schedule as schedules
from megalite.config.batch_size import parse_step_schedule
from megalite.config.parallel import zero_reason
from megalite.config.root import Config
from megalite.config.values import show

__all__ = ["RULES", "warnings"]

TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
VPP = "--virtual-pipeline-model-parallel-size"


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, rising."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def multiples_around(number: int, step: int) -> str:
    """The multiples of `step` next to `number`, as advice: `96 or 104`."""
    below, above = number // step * step, (number // step + 1) * step
    return f"{below} or {above}" if below else str(above)


def _list(numbers: Iterable[int], last: int = 12) -> str:
    found = list(numbers)
    return ",".join(str(n) for n in found[:last]) + (",..." if len(found) > last else "")


def model_shape(config: Config, world_size: int) -> Iterator[str]:
    """Heads, groups, positions."""
    model = config.model
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.query_groups
    if model.kv_channels is None and hidden % heads:
        near = multiples_around(hidden, heads)
        yield f"--hidden-size={hidden}: not divisible by --num-attention-heads={heads}; try {near}"
    if heads % groups:
        legal = _list(divisors(heads))
        yield f"--num-query-groups={groups}: must divide --num-attention-heads={heads}; legal: {legal}"
    if model.position_embedding_type == "learned_absolute" and model.seq_length > model.max_positions:
        yield (
            f"--seq-length={model.seq_length}: exceeds --max-position-embeddings={model.max_positions} "
            "(learned positions); raise it or use --position-embedding-type rope"
        )
    if model.position_embedding_type == "rope" and (model.rotary_dim % 2 or model.rotary_dim == 0):
        yield (
            f"--rotary-percent={show(model.rotary_percent)}: rotates {model.rotary_dim} of a head's {model.head_dim} "
            "channels; RoPE needs an even number above 0"
        )
    if model.ffn_size < 1:
        yield (
            f"--hidden-size={hidden}: the default MLP width of --activation={model.activation} would be 0; "
            "give --ffn-hidden-size"
        )


def recompute(config: Config, world_size: int) -> Iterator[str]:
    """Which recomputation settings belong together."""
    model = config.model
    if model.recompute_granularity != "full":
        for flag, value in (
            ("--recompute-method", model.recompute_method),
            ("--recompute-num-layers", model.recompute_num_layers),
        ):
            if value is not None:
                yield f"{flag}={show(value)}: needs --recompute-granularity=full"


def world(config: Config, world_size: int) -> Iterator[str]:
    """Does the layout fit the number of ranks?"""
    parallel = config.parallel
    needed = parallel.model_parallel_size
    if world_size < needed:
        yield f"world size {world_size}: {TP} x {PP} = {needed} needs at least {needed} processes"
    elif world_size % needed:
        yield (
            f"world size {world_size}: not divisible by {TP} x {PP} = {needed}; "
            f"use {multiples_around(world_size, needed)}"
        )
    if parallel.nprocs is not None and parallel.nprocs != world_size:
        yield f"--nprocs={parallel.nprocs}: the launcher already started {world_size} processes; drop it"
    instances = parallel.num_distributed_optimizer_instances
    replicas = max(1, world_size // needed)
    if replicas % instances:
        yield (
            f"--num-distributed-optimizer-instances={instances}: must divide the data-parallel size {replicas}; "
            f"legal: {_list(divisors(replicas))}"
        )
    if instances > 1 and parallel.zero_stage == 0:
        yield f"--num-distributed-optimizer-instances={instances}: needs --zero-stage=1 or more"
    if parallel.device == "cpu" and parallel.distributed_backend == "nccl":
        yield "--distributed-backend=nccl: needs CUDA; use gloo"
    for rank in config.logging.profile_ranks:
        if config.logging.profile and rank >= world_size:
            yield f"--profile-ranks={rank}: there are {world_size} ranks (0 to {world_size - 1})"


def tensor_parallel(config: Config, world_size: int) -> Iterator[str]:
    """What tensor parallelism must divide."""
    model, size = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.query_groups
    if heads % size:
        yield f"{TP}={size}: does not divide --num-attention-heads={heads}; legal: {_list(divisors(heads))}"
    elif heads % groups == 0 and groups % size:
        yield f"{TP}={size}: does not divide --num-query-groups={groups}; legal: {_list(divisors(groups))}"
    if model.ffn_size % size:
        yield (
            f"{TP}={size}: does not divide the MLP width {model.ffn_size} (--ffn-hidden-size); "
            f"try {multiples_around(model.ffn_size, size)}"
        )
    if config.parallel.sequence_parallel and model.seq_length % size:
        yield (
            f"--sequence-parallel: {TP}={size} does not divide --seq-length={model.seq_length}; "
            f"try {multiples_around(model.seq_length, size)}"
        )


def pipeline_stages(config: Config, world_size: int) -> Iterator[str]:
    """Stages, chunks and how layers are dealt to them."""
    parallel, layers = config.parallel, config.model.num_layers
    size, chunks = parallel.pipeline_model_parallel_size, parallel.num_chunks
    layout = parallel.pipeline_model_parallel_layout
    if size > layers and layout is None:
        yield f"{PP}={size}: more stages than --num-layers={layers}"
    elif size * chunks > layers and layout is None:
        yield (
            f"{VPP}={chunks}: {size} ranks x {chunks} chunks = {size * chunks} stages, more than --num-layers={layers}"
        )
    given = parallel.virtual_pipeline_model_parallel_size
    if given is not None and given > 1 and size == 1:
        yield f"{VPP}={given}: needs {PP} >= 2"
    ends = {
        "--decoder-first-pipeline-num-layers": parallel.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": parallel.decoder_last_pipeline_num_layers,
    }
    given_ends = {flag: count for flag, count in ends.items() if count is not None}
    for flag, count in given_ends.items():
        if size == 1:
            yield f"{flag}={count}: needs {PP} >= 2"
        if layout is not None:
            yield f"{flag}={count}: excludes --pipeline-model-parallel-layout; give one of them"
    left, stages = layers - sum(given_ends.values()), size * chunks - len(given_ends)
    if given_ends and size > 1 and (left < stages or (stages == 0 and left)):
        flag, count = next(iter(given_ends.items()))
        yield f"{flag}={count}: leaves {left} of --num-layers={layers} for the other {stages} stages"


def pipeline_schedule(config: Config, world_size: int) -> Iterator[str]:
    """Can the schedule run in this shape, with these features?"""
    parallel, training = config.parallel, config.training
    name, size, given = (
        parallel.schedule,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
    )
    if parallel.pipeline_schedule_file is not None:
        if parallel.pipeline_schedule is not None:
            yield f"--pipeline-schedule={name}: excludes --pipeline-schedule-file; give one of them"
        return
    for micro_batches, samples in _micro_batches(config, world_size):
        reasons = schedules.legal(name, size, micro_batches, given)
        for reason in reasons:
            yield reason + _enough_samples(name, size, micro_batches, given, samples)
    if parallel.pipeline_flush_steps and not schedules.find(name).asynchronous:
        yield (f"--pipeline-flush-steps={parallel.pipeline_flush_steps}: {name} flushes after every iteration; drop it")
    if name == "pipedream" and size > 1:
        why = "pipedream takes a step on each stage after each micro-batch"
        if config.optimizer.clip_grad > 0:
            yield f"--clip-grad={show(config.optimizer.clip_grad)}: {why}, so there is no global norm; use 0 or 2bw"
        if training.fp16:
            yield f"--fp16: {why}, so stages can not agree on a loss scale; use --bf16 or 2bw"
        if not config.model.untie_embeddings_and_output_weights:
            yield (
                f"--pipeline-schedule=pipedream: {why}, so tied embeddings would drift apart; "
                "use --untie-embeddings-and-output-weights or 2bw"
            )
    excluded = zero_reason(parallel.zero_stage, name)
    if excluded is not None:
        legal = _list(stage for stage in range(4) if zero_reason(stage, name) is None)
        yield f"--zero-stage={parallel.zero_stage}: not with --pipeline-schedule={name}: {excluded}; legal: {legal}"


def _micro_batches(config: Config, world_size: int) -> list[tuple[int, int]]:
    """(Micro-batches, samples) of every batch size that occurs, where they come out even."""
    unit = config.training.micro_batch_size * max(1, config.data_parallel_size(world_size))
    try:
        sizes = config.batch_size_schedule(world_size).sizes
    except ValueError:
        return []
    return [(size // unit, size) for size in dict.fromkeys(sizes) if size % unit == 0 and size >= unit]


def _enough_samples(name: str, size: int, micro_batches: int, chunks: int | None, samples: int) -> str:
    """The nearest larger batch with which the schedule runs, where that is what is missing."""
    for more in range(micro_batches + 1, micro_batches + 4 * size + 1):
        if not schedules.legal(name, size, more, chunks):
            return f" (legal: --global-batch-size={samples // micro_batches * more})"
    return ""


def batch(config: Config, world_size: int) -> Iterator[str]:
    """Global batch, micro-batch, ramp-up."""
    training = config.training
    replicas = max(1, config.data_parallel_size(world_size))
    unit = training.micro_batch_size * replicas
    rule = f"--micro-batch-size={training.micro_batch_size} x data-parallel size {replicas} = {unit}"
    size = training.global_batch_size
    if size is not None and size < unit:
        yield f"--global-batch-size={size}: smaller than {rule}"
    elif size is not None and size % unit:
        yield f"--global-batch-size={size}: not divisible by {rule}; nearest {multiples_around(size, unit)}"
    if training.rampup_batch_size is not None and training.step_batch_size_schedule is not None:
        yield "--rampup-batch-size: excludes --step-batch-size-schedule; give one of them"
    elif training.rampup_batch_size is not None:
        yield from _ramp(config, unit, rule, size if size is not None else unit)
    elif training.step_batch_size_schedule is not None:
        yield from _step_schedule(config, unit, rule)


def _ramp(config: Config, unit: int, rule: str, full: int) -> Iterator[str]:
    ramp = config.training.rampup_batch_size
    assert ramp is not None
    flag = "--rampup-batch-size=" + " ".join(str(n) for n in ramp)
    if len(ramp) != 3:
        yield f"{flag}: expected three numbers, START INCREMENT SAMPLES"
        return
    start, increment, _ = ramp
    if start > full:
        yield f"{flag}: starts above --global-batch-size={full}"
    elif (full - start) % increment:
        yield f"{flag}: increments of {increment} do not lead from {start} to --global-batch-size={full}"
    for what, number in (("start", start), ("increment", increment)):
        if number % unit:
            yield f"{flag}: the {what} is not divisible by {rule}; nearest {multiples_around(number, unit)}"


def _step_schedule(config: Config, unit: int, rule: str) -> Iterator[str]:
    training = config.training
    text = training.step_batch_size_schedule or ""
    flag = f"--step-batch-size-schedule='{text}'"
    if training.global_batch_size is not None:
        yield f"--global-batch-size={training.global_batch_size}: excludes --step-batch-size-schedule; give one of them"
    try:
        sizes = parse_step_schedule(text, config.model.seq_length).sizes
    except ValueError as error:
        yield f"{flag}: {error}; write it like '0:768 250B:1536'"
        return
    for size in sizes:
        if size % unit:
            yield f"{flag}: {size} is not divisible by {rule}; nearest {multiples_around(size, unit)}"


def length(config: Config, world_size: int) -> Iterator[str]:
    """How long the training is, and what must fit into it."""
    training = config.training
    lengths = {
        "--train-iters": training.train_iters,
        "--train-samples": training.train_samples,
        "--train-tokens": training.train_tokens,
    }
    given = [flag for flag, value in lengths.items() if value is not None]
    if len(given) > 1:
        yield f"{given[1]}={lengths[given[1]]}: excludes {given[0]}; give one of them"
    elif not given and not training.skip_train:
        yield "--train-iters: required (or --train-samples, --train-tokens, or --skip-train to only evaluate)"
    if config.logging.profile and config.logging.profile_step_end <= config.logging.profile_step_start:
        yield (
            f"--profile-step-end={config.logging.profile_step_end}: not above "
            f"--profile-step-start={config.logging.profile_step_start}"
        )


def precision(config: Config, world_size: int) -> Iterator[str]:
    """Number formats and loss scaling."""
    training = config.training
    chosen = [
        flag for flag, on in (("--bf16", training.bf16), ("--fp16", training.fp16), ("--fp64", training.fp64)) if on
    ]
    if len(chosen) > 1:
        yield f"{chosen[1]}: excludes {chosen[0]}; choose one"
    if training.loss_scale is not None and not training.fp16:
        yield f"--loss-scale={show(training.loss_scale)}: needs --fp16"
    if training.min_loss_scale > training.initial_loss_scale:
        yield f"--min-loss-scale={show(training.min_loss_scale)}: above --initial-loss-scale={show(training.initial_loss_scale)}"
    if config.parallel.grad_reduce_in_bf16 and not training.bf16:
        yield "--grad-reduce-in-bf16: needs --bf16"


def learning_rate(config: Config, world_size: int) -> Iterator[str]:
    """Warm-up and decay against each other and against the length."""
    optimizer, training = config.optimizer, config.training
    for flag, value in (("--min-lr", optimizer.min_lr), ("--lr-warmup-init", optimizer.lr_warmup_init)):
        if value > optimizer.lr:
            yield f"{flag}={show(value)}: above --lr={show(optimizer.lr)}"
    for name in ("decay", "wsd-decay"):
        field = f"lr_{name.replace('-', '_')}"
        if getattr(optimizer, f"{field}_iters") is not None and getattr(optimizer, f"{field}_samples") is not None:
            yield f"--lr-{name}-samples: excludes --lr-{name}-iters; give one of them"
    warmups = {
        "--lr-warmup-iters": optimizer.lr_warmup_iters,
        "--lr-warmup-samples": optimizer.lr_warmup_samples,
        "--lr-warmup-fraction": optimizer.lr_warmup_fraction or 0,
    }
    given = [flag for flag, value in warmups.items() if value]
    if len(given) > 1:
        yield f"{given[1]}={show(warmups[given[1]])}: excludes {given[0]}; give one of them"
    for unit, warmup in (("iters", optimizer.lr_warmup_iters), ("samples", optimizer.lr_warmup_samples)):
        decay, train = getattr(optimizer, f"lr_decay_{unit}"), getattr(training, f"train_{unit}")
        flag, end = (f"--lr-decay-{unit}", decay) if decay is not None else (f"--train-{unit}", train)
        if end is not None and warmup and warmup >= end:
            yield f"--lr-warmup-{unit}={warmup}: not below {flag}={end}"
    yield from _wsd(config)
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        yield "--use-checkpoint-opt-param-scheduler: excludes --override-opt-param-scheduler; give one of them"


def _wsd(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    decays = {
        "--lr-wsd-decay-iters": optimizer.lr_wsd_decay_iters,
        "--lr-wsd-decay-samples": optimizer.lr_wsd_decay_samples,
    }
    given = [flag for flag, value in decays.items() if value is not None]
    if optimizer.lr_decay_style == "WSD" and not given:
        yield "--lr-decay-style=WSD: needs --lr-wsd-decay-iters (or --lr-wsd-decay-samples)"
    elif optimizer.lr_decay_style != "WSD" and given:
        yield f"{given[0]}={decays[given[0]]}: needs --lr-decay-style=WSD"


def weight_decay(config: Config, world_size: int) -> Iterator[str]:
    """The weight-decay ramp has two ends or none."""
    optimizer = config.optimizer
    ends = {"--start-weight-decay": optimizer.start_weight_decay, "--end-weight-decay": optimizer.end_weight_decay}
    style = optimizer.weight_decay_incr_style
    for flag, value in ends.items():
        if style != "constant" and value is None:
            yield f"--weight-decay-incr-style={style}: needs {flag}"
        elif style == "constant" and value is not None:
            yield f"{flag}={show(value)}: needs --weight-decay-incr-style linear or cosine"


def data(config: Config, world_size: int) -> Iterator[str]:
    """Where data come from, and by which tokenizer."""
    source = config.data
    own = {
        "--train-data-path": source.train_data_path,
        "--valid-data-path": source.valid_data_path,
        "--test-data-path": source.test_data_path,
    }
    given = [flag for flag, value in own.items() if value]
    if source.data_path:
        for flag in given:
            yield f"{flag}: excludes --data-path; give one kind"
    if source.data_args_path is not None and (source.data_path or given):
        yield f"--data-args-path={source.data_args_path}: excludes --data-path and its kin; give one kind"
    if source.mock_data and (source.data_path or given or source.data_args_path is not None):
        yield "--mock-data: excludes --data-path and its kin; give one kind"
    for path in (*source.data_path, *source.train_data_path, *source.valid_data_path, *source.test_data_path):
        if path.endswith((".bin", ".idx")):
            yield f"--data-path={path}: give the prefix, '{path[:-4]}'"
    yield from _split_weights(source.split)
    yield from _tokenizer(config)


def _split_weights(text: str) -> Iterator[str]:
    try:
        weights = [float(part) for part in text.replace(" ", "").split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not all(0 <= weight < float("inf") for weight in weights) or not sum(weights):
        yield f"--split={text}: expected up to three weights such as 969,30,1, not all 0"


def _tokenizer(config: Config) -> Iterator[str]:
    source, kind = config.data, config.data.tokenizer_type
    if kind == "GPT2BPETokenizer":
        for flag, value in (("--vocab-file", source.vocab_file), ("--merge-file", source.merge_file)):
            if value is None:
                yield f"--tokenizer-type={kind}: needs {flag}"
    elif kind in ("HuggingFaceTokenizer", "SentencePieceTokenizer") and source.tokenizer_model is None:
        yield f"--tokenizer-type={kind}: needs --tokenizer-model"
    elif kind == "NullTokenizer" and config.model.vocab_size < 2:
        yield f"--tokenizer-type={kind}: needs --vocab-size"
    elif kind is None and source.mock_data and config.model.vocab_size < 2:
        yield "--mock-data: needs --vocab-size (or a --tokenizer-type)"
    takers = {
        "--tokenizer-model": (source.tokenizer_model, ("HuggingFaceTokenizer", "SentencePieceTokenizer")),
        "--vocab-file": (source.vocab_file, ("GPT2BPETokenizer",)),
        "--merge-file": (source.merge_file, ("GPT2BPETokenizer",)),
    }
    for flag, (value, kinds) in takers.items():
        if value is not None and kind not in kinds:
            yield f"{flag}={show(value)}: needs --tokenizer-type={' or '.join(kinds)}"


def checkpoint(config: Config, world_size: int) -> Iterator[str]:
    """Saving needs a place, loading a source."""
    settings = config.checkpoint
    if settings.save is None:
        for flag, value in (
            ("--save-interval", settings.save_interval),
            ("--keep-last-n", settings.keep_last_n),
            ("--save-retain-interval", settings.save_retain_interval),
        ):
            if value is not None:
                yield f"{flag}={show(value)}: needs --save"
        for flag, on in (("--async-save", settings.async_save), ("--auto-resume", settings.auto_resume)):
            if on:
                yield f"{flag}: needs --save"
    interval, retain = settings.save_interval, settings.save_retain_interval
    if retain is not None and interval is not None and retain % interval:
        near = multiples_around(retain, interval)
        yield f"--save-retain-interval={retain}: not a multiple of --save-interval={interval}; try {near}"
    if settings.load is None:
        if settings.ckpt_step is not None and not settings.auto_resume:
            yield f"--ckpt-step={settings.ckpt_step}: needs --load"
        for flag, on in (
            ("--finetune", settings.finetune),
            ("--no-load-optim", not settings.load_optim),
            ("--no-load-rng", not settings.load_rng),
        ):
            if on and not (settings.auto_resume and flag != "--finetune"):
                yield f"{flag}: needs --load"
    elif settings.auto_resume and settings.load != settings.save:
        yield f"--load={settings.load}: excludes --auto-resume, which loads from --save; give one of them"


def tracking(config: Config, world_size: int) -> Iterator[str]:
    """Weights & Biases settings need a project."""
    log = config.logging
    if log.wandb_project is None:
        for flag, value in (
            ("--wandb-exp-name", log.wandb_exp_name),
            ("--wandb-entity", log.wandb_entity),
            ("--wandb-save-dir", log.wandb_save_dir),
        ):
            if value is not None:
                yield f"{flag}={show(value)}: needs --wandb-project"


RULES: tuple[Callable[[Config, int], Iterator[str]], ...] = (
    model_shape,
    recompute,
    world,
    tensor_parallel,
    pipeline_stages,
    pipeline_schedule,
    batch,
    length,
    precision,
    learning_rate,
    weight_decay,
    data,
    checkpoint,
    tracking,
)


def warnings(config: Config, world_size: int) -> list[str]:
    """What is legal but doubtful, for a configuration without problems."""
    parallel, training = config.parallel, config.training
    lines = []
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        lines.append(f"--sequence-parallel: has no effect at {TP}=1; drop it")
    if training.fp16 and parallel.device == "cpu":
        lines.append("--fp16: slow on a CPU; --bf16 needs no loss scaling")
    if config.optimizer.lr > 0.1 and config.optimizer.optimizer == "adam":
        lines.append(f"--lr={show(config.optimizer.lr)}: unusually high for adam; 1e-4 to 1e-3 is common")
    if parallel.pipeline_schedule_file is None and parallel.pipeline_model_parallel_size > 1:
        for micro_batches, _ in _micro_batches(config, world_size):
            lines += schedules.warnings(
                parallel.schedule,
                parallel.pipeline_model_parallel_size,
                micro_batches,
                parallel.virtual_pipeline_model_parallel_size,
            )
    return list(dict.fromkeys(lines))
