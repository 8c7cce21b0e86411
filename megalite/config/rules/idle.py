"""Settings that mean nothing beside others: legal, ignored, told. Of values that no flag has changed nothing is said.

One table for what is switched off, and the points in time that a training never reaches. A check that makes a run
impossible is a rule of its topic and no warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megalite.config.architecture import YARN
from megalite.config.root import SECTIONS, Config
from megalite.config.schema import flat, options_of
from megalite.config.training import TrainingLength
from megalite.config.values import as_typed

OFF = "has no effect"


def idle_settings(config: Config, world_size: int) -> Iterator[str]:
    """One line for each."""
    given = _given(config)
    for names, idle, beside in (*_of_model(config), *_of_training(config, given), *_of_saving(config)):
        for name in names.split() if idle else ():
            if name in given:
                yield f"{_typed(name, given[name])}: {OFF} {beside}; drop it"
    yield from _never_reached(config, world_size, given)


Idle = tuple[str, bool, str]
"""Fields, whether they are idle, and beside what."""


def _given(config: Config) -> dict[str, Any]:
    """Field -> value, of those that are not their defaults."""
    found: dict[str, Any] = {}
    for section, cls in SECTIONS.items():
        values = flat(getattr(config, section))
        found |= {each.name: values[each.name] for each in options_of(section, cls) if not each.required}
    defaults = {each.name: each.default for section, cls in SECTIONS.items() for each in options_of(section, cls)}
    return {name: value for name, value in found.items() if value != defaults[name]}


def _typed(name: str, value: Any) -> str:
    """As the user gave it: a switch that is on by itself is given by its `--no-` form."""
    return f"`no_{name}`" if value is False else as_typed(f"`{name}`", value)


def _of_model(config: Config) -> Iterable[Idle]:
    model, precision = config.model, config.training.precision
    experts, kind = model.experts, model.position_embedding_type
    dense = experts.num_experts is None or not all(model.sparse_layers) or experts.moe_ffn_hidden_size is None
    return (
        (
            "rotary_base rotary_percent rotary_seq_len_interpolation_factor use_rope_scaling window_rotary_base",
            kind != "rope",
            f"with `position_embedding_type`={kind}",
        ),
        (
            "position_embedding_type rotary_base rotary_percent",
            kind == "rope" and not any(map(model.has_rope, range(model.num_layers))),
            f"with `no_rope_freq`={model.no_rope_freq}, which leaves no layer with RoPE",
        ),
        ("kv_channels", model.mixer == "latent", "with `multi_latent_attention`, whose heads have sizes of their own"),
        (" ".join(YARN), model.rope_scaling.kind == "llama3", "with `rope_scaling_type`=llama3"),
        ("mscale mscale_all_dim", model.rope_scaling.kind is None, "without `rope_scaling`, of type yarn"),
        (
            "moe_router_pre_softmax",
            experts.moe_router_score_function == "sigmoid",
            "with `moe_router_score_function`=sigmoid",
        ),
        ("reset_position_ids", kind == "none", "with `position_embedding_type`=none"),
        (
            "window_size",
            model.window_size is not None and model.window_size >= model.seq_length,
            f"with `seq_length`={model.seq_length}, of which a token sees at most all",
        ),
        (
            "attention_softmax_in_fp32 fp32_residual_connection",
            not precision.half,
            f"in {precision.name}, which is no narrower",
        ),
        ("float32_matmul_precision", precision.fp64, "with `fp64`"),
        (
            "moe_router_load_balancing_type",
            experts.moe_router_load_balancing_type != "none" and not experts.balances,
            "without `moe_aux_loss_coeff`",
        ),
        (
            "moe_expert_capacity_factor",
            (experts.moe_expert_capacity_factor or 0) * experts.moe_router_topk >= (experts.num_experts or 1),
            "at this size: an expert has room for all tokens",
        ),
        ("ffn_hidden_size", not dense, "where every block has experts of `moe_ffn_hidden_size`"),
    )


def _of_training(config: Config, given: dict[str, Any]) -> Iterable[Idle]:
    training, optimizer, scaling = config.training, config.optimizer, config.training.loss_scaling
    warmup, style = optimizer.lr_warmup, optimizer.lr_decay_style
    warms = warmup.lr_warmup_iters or warmup.lr_warmup_samples or warmup.lr_warmup_fraction
    ramp = optimizer.weight_decay_ramp.weight_decay_incr_style
    skips = training.precision.fp16 or training.nonfinite == "skip" or training.spikes.on_spike in ("skip", "rollback")
    return (
        (
            "min_lr decoupled_min_lr lr_decay_iters lr_decay_samples",
            style == "constant",
            "with `lr_decay_style`=constant",
        ),
        ("lr_wsd_decay_style", style != "WSD", f"with `lr_decay_style`={style}"),
        (
            "seq_length_schedule",
            training.seq_length_schedule is not None and len(config.length_schedule.lengths) == 1,
            "with one length",
        ),
        ("lr_warmup_init", not warms, "without a warm-up"),
        ("weight_decay", ramp != "constant", f"with `weight_decay_incr_style`={ramp}, which has ends of its own"),
        (
            "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
            scaling.loss_scale is not None and training.precision.fp16,
            "with `loss_scale`, which is constant",
        ),
        (
            "max_skipped_updates",
            not skips,
            "without `fp16`, `nonfinite`=skip or `on_spike`=skip, where no update is skipped",
        ),
        (
            "rollback_iters rollback_skip_iters rollback_limit",
            training.spikes.on_spike != "rollback",
            "without `on_spike`=rollback",
        ),
        (
            "fp8_amax_history_len",
            training.float8.fp8_format is not None and training.float8.fp8_recipe != "delayed",
            f"with `fp8_recipe`={training.float8.fp8_recipe}, which looks at the numbers themselves",
        ),
        (
            "fp8_param_gather",
            config.parallel.zero_stage != 3,
            f"with `zero_stage`={config.parallel.zero_stage}, where weights do not travel for each pass",
        ),
        ("eval_interval full_validation", training.eval_iters == 0, "with `eval_iters`=0"),
        (
            "eval_iters",
            training.full_validation and training.eval_iters != 0,
            "with `full_validation`, which takes the whole split",
        ),
        (
            "eval_interval exit_interval exit_duration_in_mins iterations_to_skip save_interval async_save keep_last_n "
            "save_retain_interval loss_by_part",
            training.skip_train,
            "with `skip_train`",
        ),
        ("check_pipeline_messages", config.parallel.pipeline_model_parallel_size == 1, "without pipeline ranks"),
    )


def _of_saving(config: Config) -> Iterable[Idle]:
    settings = config.checkpoint
    loads = settings.load is not None or settings.auto_resume
    unread = {
        "with `finetune`, which takes no schedules from `load`": settings.finetune,
        "with `no_load_optim`, which takes no schedules from `load`": not settings.load_optim,
        "with `skip_train`, which takes no schedules from `load`": config.training.skip_train,
        "without `load`": not loads,
    }
    schedules = next((beside for beside, on in unread.items() if on), "")
    return (
        ("allow_data_change load_optim load_rng", not loads, "without `load`"),
        ("override_opt_param_scheduler use_checkpoint_opt_param_scheduler", bool(schedules), schedules),
        ("load_optim load_rng", loads and settings.finetune, "with `finetune`, which takes the weights alone"),
    )


def _never_reached(config: Config, world_size: int, given: dict[str, Any]) -> Iterator[str]:
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
