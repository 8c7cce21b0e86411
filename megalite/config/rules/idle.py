"""Settings that mean nothing beside others: legal, ignored, told. Of values that no flag has changed nothing is said.

What is switched off, and the points in time that a training never reaches. A check that makes a run
impossible is a rule of its topic and no warning.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megalite.config.architecture import YARN
from megalite.config.root import Config
from megalite.config.training import TrainingLength
from megalite.config.values import as_typed

OFF = "has no effect"


def idle_settings(config: Config, world_size: int) -> Iterator[str]:
    """One line for each."""
    given = config.given
    for names, beside in (*_of_model(config), *_of_training(config), *_of_saving(config)):
        for name in names.split():
            if name in given:
                yield f"{_typed(name, given[name])}: {OFF} {beside}; drop it"
    yield from _never_reached(config, world_size, given)


Idle = tuple[str, str]
"""Fields that are idle, and beside what."""


def _typed(name: str, value: Any) -> str:
    """As the user gave it: a switch that is on by itself is given by its `--no-` form."""
    return f"`no_{name}`" if value is False else as_typed(f"`{name}`", value)


def _of_model(config: Config) -> Iterator[Idle]:
    model, precision, experts = config.model, config.training.precision, config.model.experts
    kind = f"with `position_embedding_type`={model.position_embedding_type}"
    if model.position_embedding_type != "rope":
        yield "rotary_base rotary_percent rotary_seq_len_interpolation_factor use_rope_scaling window_rotary_base", kind
    elif not any(map(model.has_rope, range(model.num_layers))):
        none = f"with `no_rope_freq`={model.no_rope_freq}, which leaves no layer with RoPE"
        yield "position_embedding_type rotary_base rotary_percent", none
    if model.mixer == "latent":
        yield "kv_channels", "with `multi_latent_attention`, whose heads have sizes of their own"
    if model.rope_scaling.kind == "llama3":
        yield " ".join(YARN), "with `rope_scaling_type`=llama3"
    if model.rope_scaling.kind is None:
        yield "mscale mscale_all_dim", "without `rope_scaling`, of type yarn"
    if experts.moe_router_score_function == "sigmoid":
        yield "moe_router_pre_softmax", "with `moe_router_score_function`=sigmoid"
    if model.position_embedding_type == "none":
        yield "reset_position_ids", kind
    if model.window_size is not None and model.window_size >= model.seq_length:
        yield "window_size", f"with `seq_length`={model.seq_length}, of which a token sees at most all"
    if not precision.half:
        narrow = f"in {precision.name}, which is no narrower"
        yield "attention_softmax_in_fp32 fp32_residual_connection", narrow
    if precision.fp64:
        yield "float32_matmul_precision", "with `fp64`"
    if experts.moe_router_load_balancing_type != "none" and not experts.balances:
        yield "moe_router_load_balancing_type", "without `moe_aux_loss_coeff`"
    if (experts.moe_expert_capacity_factor or 0) * experts.moe_router_topk >= (experts.num_experts or 1):
        yield "moe_expert_capacity_factor", "at this size: an expert has room for all tokens"
    if experts.num_experts is not None and all(model.sparse_layers) and experts.moe_ffn_hidden_size is not None:
        yield "ffn_hidden_size", "where every block has experts of `moe_ffn_hidden_size`"


def _of_training(config: Config) -> Iterator[Idle]:
    training, optimizer, stage = config.training, config.optimizer, config.parallel.zero_stage
    warmup, style, spike = optimizer.lr_warmup, optimizer.lr_decay_style, training.spikes.on_spike
    ramp, float8 = optimizer.weight_decay_ramp.weight_decay_incr_style, training.float8
    if style == "constant":
        yield "min_lr decoupled_min_lr lr_decay_iters lr_decay_samples", "with `lr_decay_style`=constant"
    if style != "WSD":
        yield "lr_wsd_decay_style", f"with `lr_decay_style`={style}"
    if training.seq_length_schedule is not None and len(config.length_schedule.lengths) == 1:
        yield "seq_length_schedule", "with one length"
    if not (warmup.lr_warmup_iters or warmup.lr_warmup_samples or warmup.lr_warmup_fraction):
        yield "lr_warmup_init", "without a warm-up"
    if ramp != "constant":
        yield "weight_decay", f"with `weight_decay_incr_style`={ramp}, which has ends of its own"
    if training.loss_scaling.loss_scale is not None and training.precision.fp16:
        constant = "with `loss_scale`, which is constant"
        yield "initial_loss_scale min_loss_scale loss_scale_window hysteresis", constant
    if not (training.precision.fp16 or training.nonfinite == "skip" or spike in ("skip", "rollback")):
        never = "without `fp16`, `nonfinite`=skip or `on_spike`=skip, where no update is skipped"
        yield "max_skipped_updates", never
    if spike != "rollback":
        yield "rollback_iters rollback_skip_iters rollback_limit", "without `on_spike`=rollback"
    if float8.fp8_format is not None and float8.fp8_recipe != "delayed":
        yield "fp8_amax_history_len", f"with `fp8_recipe`={float8.fp8_recipe}, which looks at the numbers themselves"
    if stage != 3:
        yield "fp8_param_gather", f"with `zero_stage`={stage}, where weights do not travel for each pass"
    if training.eval_iters == 0:
        yield "eval_interval full_validation", "with `eval_iters`=0"
    elif training.full_validation:
        yield "eval_iters", "with `full_validation`, which takes the whole split"
    if training.skip_train:
        yield "eval_interval exit_interval exit_duration_in_mins iterations_to_skip", "with `skip_train`"
        yield "save_interval async_save keep_last_n save_retain_interval loss_by_part", "with `skip_train`"
    if config.parallel.pipeline_model_parallel_size == 1:
        yield "check_pipeline_messages", "without pipeline ranks"


def _of_saving(config: Config) -> Iterator[Idle]:
    settings = config.checkpoint
    loads = settings.load is not None or settings.auto_resume
    unread = {
        "with `finetune`, which takes no schedules from `load`": settings.finetune,
        "with `no_load_optim`, which takes no schedules from `load`": not settings.load_optim,
        "with `skip_train`, which takes no schedules from `load`": config.training.skip_train,
        "without `load`": not loads,
    }
    if not loads:
        yield "allow_data_change load_optim load_rng", "without `load`"
    for beside in [beside for beside, on in unread.items() if on][:1]:
        yield "override_opt_param_scheduler use_checkpoint_opt_param_scheduler", beside
    if loads and settings.finetune:
        yield "load_optim load_rng", "with `finetune`, which takes the weights alone"


def _never_reached(config: Config, world_size: int, given: Mapping[str, Any]) -> Iterator[str]:
    """Iterations and tokens beyond the end of the training."""
    training, parallel = config.training, config.parallel
    if training.skip_train or training.length == TrainingLength():
        return
    sizes, total = config.batch_size_schedule(world_size), config.train_iterations(world_size)
    samples = sizes.samples_after(total)
    ends = f"the training ends after {samples:,} samples"
    starts = {
        "profile_step_start": config.logging.profiling.profile,
        "sample_interval": True,
        "eval_tasks_interval": True,
        "exit_interval": True,
    }
    for name, on in starts.items():
        if on and name in given and given[name] > total:
            yield f"`{name}`={given[name]}: {OFF}, the training ends after {total} iterations"
    late = [number for number in training.iterations_to_skip if number > total]
    if late:
        yield f"`iterations_to_skip`={late[0]}: {OFF}, the training ends after {total} iterations"
    if parallel.pipeline_flush_steps >= total:
        yield f"`pipeline_flush_steps`={parallel.pipeline_flush_steps}: no iteration of {total} has any delay left"
    growing: dict[str, Any] = {"rampup_batch_size": sizes.steps, "step_batch_size_schedule": sizes.steps}
    growing["seq_length_schedule"] = config.length_schedule.steps
    growing["data_schedule"] = config.data.phases(config.model.seq_length)
    for name, steps in growing.items():
        never = [number for first, number in steps if first >= samples]
        if name in given and never:
            yield f"{_typed(name, given[name])}: {never[0]} is never reached, {ends}"
