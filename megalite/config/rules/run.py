"""Rules of a run: length, restarts, precision, spikes, QK-clip, float8, learning rate, weight decay, optimizer."""

from collections.abc import Iterator

from megalite.config.root import Config
from megalite.config.rules.beside import excluded
from megalite.config.rules.text import CP, TP
from megalite.config.staleness import has_delay
from megalite.config.training import TrainingLength
from megalite.config.update_rules import OPTIMIZER_SPECS
from megalite.config.values import show
from megalite.schedule import find_schedule


def length(config: Config, world_size: int) -> Iterator[str]:
    """How long the training is, and what must fit into it."""
    if config.training.length == TrainingLength() and not config.training.skip_train:
        yield "`train_iters`: required (or `train_samples`, `train_tokens`, or `skip_train` to only evaluate)"
    if config.training.skip_train and config.training.eval_iters == 0:
        yield "`skip_train`: with `eval_iters`=0 there is nothing to do; drop one of them"
    window = config.logging.profiling
    if window.profile and window.profile_step_end <= window.profile_step_start:
        end, start = window.profile_step_end, window.profile_step_start
        yield f"`profile_step_end`={end}: not above `profile_step_start`={start}"


def restarts(config: Config, world_size: int) -> Iterator[str]:
    """A run that is started again must find its newest checkpoint."""
    given, settings = config.parallel.restarts, config.checkpoint
    if given.max_restarts and config.parallel.nprocs is None:
        yield (
            f"`max_restarts`={given.max_restarts}: restarts the ranks of `nprocs`; torchrun has a flag of the same "
            "name, scripts/slurm.sbatch the variable MAX_RESTARTS"
        )
    resumes = settings.save is not None and (settings.auto_resume or settings.load == settings.save)
    if given.check_hosts and settings.save is None:
        yield "`check_hosts`: needs `save` DIR, where it lists the hosts that it leaves out; add it"
    for name in ("max_restarts", "elastic"):
        if name in config.given and not resumes:
            yield f"`{name}`={config.given[name]}: the next attempt would begin anew; add `save` DIR and `auto_resume`"


def precision(config: Config, world_size: int) -> Iterator[str]:
    training = config.training
    scaling = training.loss_scaling
    if scaling.min_loss_scale > scaling.initial_loss_scale:
        smallest, first = show(scaling.min_loss_scale), show(scaling.initial_loss_scale)
        yield f"`min_loss_scale`={smallest}: above `initial_loss_scale`={first}"
    if config.parallel.grad_reduce_in_bf16 and not training.precision.bf16:
        yield "`grad_reduce_in_bf16`: needs `bf16`"


def spikes(config: Config, world_size: int) -> Iterator[str]:
    """A rollback needs checkpoints that are old enough, and passes over the spike itself."""
    given, settings = config.training.spikes, config.checkpoint
    back, over, interval = given.rollback_iters, given.rollback_skip_iters, settings.save_interval
    if settings.save is None or interval is None:
        yield "`on_spike`=rollback: goes back to a checkpoint of this run; add `save` and `save_interval`"
    elif settings.kept is not None and (settings.kept - 1) * interval + 1 < back:
        least = -(-(back - 1) // interval) + 1
        yield (
            f"`keep_last_n`={settings.kept}: `on_spike`=rollback goes back {back} iterations, and with "
            f"`save_interval`={interval} the oldest checkpoint that is kept may be newer; keep {least}, or go back less"
        )
    if over < back:
        yield (
            f"`rollback_skip_iters`={over}: below `rollback_iters`={back}, so that the spike itself would come again; "
            f"use {back} or more"
        )


def qk_clip(config: Config, world_size: int) -> Iterator[str]:
    """What has no scores to look at, or no masters to scale behind a step."""
    parallel = config.parallel
    schedule, kind = find_schedule(parallel.schedule), parallel.context.cp_comm_type
    reasons = {
        "qk_layernorm": "whose norms undo a scale of the projections",
        "attn_logit_softcapping": "which bounds the scores already",
        "multi_latent_attention": "whose projections are others",
        "attention_output_gate": "whose rows stand between those of queries",
        "experimental_attention_variant": "whose layers have no scores",
        "mtp_num_layers": "whose blocks are not those of the model",
        "lora_rank": "whose projections are frozen",
        "compile": "whose code does not return the scores",
        "optimizer_cpu_offload param_offload": "whose masters are on the host",
        "optimizer_offload_path": "whose masters are in files",
        "delayed_parameter_update": "whose step ends later",
        "store_param_remainders": "whose masters exist only in a step",
    }
    yield from excluded(config, "`qk_clip`", reasons, "drop one of them")
    if parallel.context.context_parallel_size > 1 and kind.startswith("a2a"):
        yield f"`qk_clip`: not with `cp_comm_type`={kind}, where heads change their ranks; use p2p or all_gather"
    if schedule.update_per_microbatch and parallel.pipeline_model_parallel_size > 1:
        yield f"`qk_clip`: not with `pipeline_schedule`={schedule.name}, which steps after each micro-batch; use 2bw"


def mup(config: Config, world_size: int) -> Iterator[str]:
    """Whose sizes of updates are known, and what else would decide the same."""
    optimizer = config.optimizer
    spec, mode = OPTIMIZER_SPECS[optimizer.optimizer], optimizer.args.muon_scale_mode
    if not spec.scales:
        ruled = ", ".join(name for name, each in OPTIMIZER_SPECS.items() if each.scales)
        yield f"`optimizer`={optimizer.optimizer}: not with `use_mup`, which has no rule for it; use one of {ruled}"
    elif spec.whole is not None and mode == "spectral":
        yield (
            f"`muon_scale_mode`={mode}: under `use_mup` updates of any width have one effect; use unit_rms_norm, "
            "sqrt(rows / columns)"
        )


def float8(config: Config, world_size: int) -> Iterator[str]:
    """Formats beside it, and blocks that end where ranks do."""
    given, model, context = config.training.float8, config.model, config.parallel.context.context_parallel_size
    flag, tp = f"`fp8_format`={given.fp8_format}", config.parallel.tensor_model_parallel_size
    if config.training.precision.fp64 and not config.data.mock_data:
        yield (
            f"{flag}: of the 16 digits of `fp64` its products keep one or two; use `bf16` (both, to compare layouts, "
            "only with `mock_data`)"
        )
    if config.gathers_float8:
        flag = "`fp8_param_gather`"
        if given.fp8_recipe not in ("tensorwise", "delayed"):
            yield f"{flag}: not with `fp8_recipe`={given.fp8_recipe}, whose scales shards cut; use tensorwise"
        if config.optimizer.offload.param_offload == "cpu":
            yield f"{flag}: not with `param_offload`=cpu, whose weights come from the host; drop one"
    block = {"blockwise": 128, "mxfp8": 32}.get(given.fp8_recipe)
    if block is None:
        return
    sizes = {
        "the queries, keys and values": (model.query_size + 2 * model.kv_size, TP, tp),
        "the heads": (model.query_size, TP, tp),
        "the MLP width (`ffn_hidden_size`)": (model.ffn_size, TP, tp),
        "the tokens of a micro-batch, twice": (model.seq_length * config.training.micro_batch_size, CP, 2 * context),
    }
    for what, (size, axis, parts) in sizes.items():
        if parts > (2 if axis == CP else 1) and size % (block * parts):
            where = f"{axis} cuts {what}, {size}, not at multiples of {block}"
            yield f"`fp8_recipe`={given.fp8_recipe}: {where}; use rowwise"


def learning_rate(config: Config, world_size: int) -> Iterator[str]:
    """Warm-up and decay against each other and against the length."""
    optimizer, training = config.optimizer, config.training
    for flag, value in (("`min_lr`", optimizer.min_lr), ("`lr_warmup_init`", optimizer.lr_warmup.lr_warmup_init)):
        if value > optimizer.lr:
            yield f"{flag}={show(value)}: above `lr`={show(optimizer.lr)}"
    own, low = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if own is not None and optimizer.ends_min_lr > own:
        given = f"`min_lr`={show(optimizer.min_lr)}" if low is None else f"`decoupled_min_lr`={show(low)}"
        yield f"{given}: above `decoupled_lr`={show(own)}; give `decoupled_min_lr` below it"
    warmup = optimizer.lr_warmup
    for unit, length in (("iters", warmup.lr_warmup_iters), ("samples", warmup.lr_warmup_samples)):
        decay, train = getattr(optimizer.lr_decay, f"lr_decay_{unit}"), getattr(training.length, f"train_{unit}")
        flag, end = (f"`lr_decay_{unit}`", decay) if decay is not None else (f"`train_{unit}`", train)
        if end is not None and length and length >= end:
            yield f"`lr_warmup_{unit}`={length}: not below {flag}={end}; use {end // 10}, or train longer"
    final = [name for name in ("lr_wsd_decay_iters", "lr_wsd_decay_samples") if name in config.given]
    if optimizer.lr_decay_style == "WSD" and not final:
        yield "`lr_decay_style`=WSD: needs `lr_wsd_decay_iters` (or `lr_wsd_decay_samples`)"
    elif optimizer.lr_decay_style != "WSD" and final:
        yield f"`{final[0]}`={config.given[final[0]]}: needs `lr_decay_style`=WSD"
    yield from _in_samples(config, world_size)


def _in_samples(config: Config, world_size: int) -> Iterator[str]:
    """The same of lengths in other units: a warm-up or a last decay beside which no iteration has the whole rate."""
    settings, length = config.optimizer, config.training.length
    try:
        batch, total = config.global_batch_size(world_size), config.total_train_samples(world_size)
    except ValueError:  # of the ramp-up flags, which have a line of their own
        return
    if length == TrainingLength() or total == 0:
        return
    decay, warmup = settings.lr_decay.samples(batch, total), settings.lr_warmup
    whole = f"the {decay:,} samples until the decay's end"
    units = {"iters": warmup.lr_warmup_iters, "samples": warmup.lr_warmup_samples}
    for unit, given in units.items():
        alike = getattr(settings.lr_decay, f"lr_decay_{unit}"), getattr(length, f"train_{unit}")
        told = all(units.values()) or given >= min((end for end in alike if end is not None), default=given + 1)
        samples = given * (batch if unit == "iters" else 1)
        if given and not told and samples >= decay:
            yield f"`lr_warmup_{unit}`={given}: {samples:,} samples, not below {whole}; warm up less, or train longer"
    final = settings.lr_wsd_decay
    if settings.lr_decay_style == "WSD" and (samples := final.samples(batch)) > decay:
        flag = "iters" if final.lr_wsd_decay_samples is None else "samples"
        number = final.lr_wsd_decay_iters if final.lr_wsd_decay_samples is None else final.lr_wsd_decay_samples
        yield f"`lr_wsd_decay_{flag}`={number}: {samples:,} samples, above {whole}; decay less, or train longer"


def weight_decay(config: Config, world_size: int) -> Iterator[str]:
    style, given = config.optimizer.weight_decay_ramp.weight_decay_incr_style, config.given
    for name in ("start_weight_decay", "end_weight_decay"):
        if style != "constant" and name not in given:
            yield f"`weight_decay_incr_style`={style}: needs `{name}`"
        elif style == "constant" and name in given:
            yield f"`{name}`={show(given[name])}: needs `weight_decay_incr_style` linear or cosine"


def update_rule(config: Config, world_size: int) -> Iterator[str]:
    optimizer = config.optimizer
    name = optimizer.optimizer
    for field in dict.fromkeys(field for rule in OPTIMIZER_SPECS.values() for field in rule.settings):
        if field in config.given and field not in OPTIMIZER_SPECS[name].settings:
            users = " and ".join(user for user, rule in OPTIMIZER_SPECS.items() if field in rule.settings)
            yield f"`{field}`={config.given[field]}: not with `optimizer`={name}; it belongs to {users}"
    if optimizer.optimizer_impl == "apex" and (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype) != ("fp32", "fp32"):
        yield "`optimizer_impl`=apex: keeps both moments in fp32; drop `exp_avg_dtype` and `exp_avg_sq_dtype`"
    yield from _staleness(config)
    if optimizer.store_param_remainders:
        if not config.training.precision.bf16:
            yield "`store_param_remainders`: needs `bf16` (only a bf16 weight is the upper half of its master)"
        if find_schedule(config.parallel.schedule).asynchronous:
            yield (
                f"`store_param_remainders`: not with `pipeline_schedule`={config.parallel.schedule}, which writes the "
                "weights of an update elsewhere than it reads them"
            )


def delayed_update(config: Config, world_size: int) -> Iterator[str]:
    schedule, flag = find_schedule(config.parallel.schedule), "`delayed_parameter_update`"
    if config.optimizer.store_param_remainders:
        yield f"{flag}: excludes `store_param_remainders`, whose masters share memory with the weights; drop one"
    if config.parallel.zero_stage == 3 and config.model.adapted_parts:
        yield f"{flag}: not with `zero_stage`=3 and `lora_rank`, whose frozen weights have one version; use stage 2"
    if config.parallel.pipeline_schedule_file is not None:
        return
    if schedule.asynchronous:
        yield f"{flag}: not with `pipeline_schedule`={schedule.name}, whose gradients are late already; drop one"
    if config.parallel.zero_stage == 3 and schedule.gathers_once:
        yield (
            f"{flag}: not with `zero_stage`=3 and `pipeline_schedule`={schedule.name}, which would gather both weight "
            "versions at once; use `zero_stage`=2, or `pipeline_schedule`=1f1b"
        )


def _staleness(config: Config) -> Iterator[str]:
    optimizer, parallel, given = config.optimizer, config.parallel, config.optimizer.staleness
    method, ahead = given.staleness_correction, given.staleness_lookahead
    flag = f"`staleness_correction`={method}"
    if method not in (None, "none"):
        if not has_delay(config):
            schedule = parallel.pipeline_schedule_file or parallel.schedule
            alone = " on one rank" if find_schedule(parallel.schedule).asynchronous else ""
            yield f"{flag}: {schedule}{alone} has no delay to correct; drop it, or use `pipeline_schedule`=2bw"
        if optimizer.optimizer_impl == "apex":
            yield f"{flag}: not with `optimizer_impl`=apex, whose step is closed; drop one of them"
        rule = OPTIMIZER_SPECS[optimizer.optimizer]
        why = rule.nesterov or (None if rule.moments(optimizer) else "its momentum is 0")
        if method == "nesterov" and why is not None:
            yield f"{flag}: not with `optimizer`={optimizer.optimizer}: {why}; use predict"
    numbers = 1 if OPTIMIZER_SPECS[optimizer.optimizer].whole is None else 2
    if ahead is not None and len(ahead) > numbers:
        most = ("one", "one or two")[numbers - 1]
        why = f"a second number is of what Muon, SOAP and Shampoo leave to AdamW; give {most}"
        yield f"`staleness_lookahead`={show(ahead)}: {why}"
    if ahead is not None and config.staleness.method != "predict":
        yield f"`staleness_lookahead`={show(ahead)}: needs `staleness_correction`=predict and a schedule with delay"
