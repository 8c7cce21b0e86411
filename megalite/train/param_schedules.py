"""Learning rate and weight decay over a run, and which of two schedules a resumed run follows.

Megatron-LM's rules: where the flags' schedules are not the checkpoint's, that is an error, unless
--override-opt-param-scheduler (the flags hold) or --use-checkpoint-opt-param-scheduler (the checkpoint holds) is given.
Only what has an effect is compared: the end of the decay says nothing about a constant rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from megalite.checkpoint import Meta
from megalite.config import Config, Decay, Warmup, flat, show
from megalite.errors import ConfigError, flag_of
from megalite.optim import DecayStyle, LearningRateSchedule, RampStyle, WeightDecaySchedule, WsdStyle
from megalite.train.starting_point import StartingPoint

META = "opt_param_scheduler"
OVERRIDE, ADOPT = "`override_opt_param_scheduler`", "`use_checkpoint_opt_param_scheduler`"
# What is compared -> the flags that set it, the first that is given counts.
FLAGS: Mapping[str, tuple[str, ...]] = {
    "decay": ("lr_decay_samples", "lr_decay_iters"),
    "warmup": ("lr_warmup_fraction", "lr_warmup_samples", "lr_warmup_iters"),
    "wsd_decay": ("lr_wsd_decay_samples", "lr_wsd_decay_iters"),
    "wd_ramp": (),
    "start_weight_decay": ("start_weight_decay", "weight_decay"),
    "end_weight_decay": ("end_weight_decay", "weight_decay"),
}
LENGTHS: Mapping[str, str] = {
    "decay": "the learning rate decays over",
    "warmup": "the learning rate warms up over",
    "wsd_decay": "the final decay takes",
    "wd_ramp": "weight decay changes over",
}


@dataclass(frozen=True)
class ParamSchedules:
    """All as functions of the samples that the schedules have seen."""

    learning_rate: LearningRateSchedule
    weight_decay: WeightDecaySchedule
    # Of word embedding and output layer, where it is another (Megatron-LM's: the same course between its own numbers).
    decoupled: LearningRateSchedule | None = None

    @classmethod
    def of(cls, config: Config, world_size: int) -> ParamSchedules:
        """What the flags say; lengths in iterations are counted in full global batches."""
        settings, sizes = config.optimizer, config.batch_size_schedule(world_size)
        total = sizes.samples_after(config.train_iterations(world_size))
        decay = settings.lr_decay.samples(sizes.final, total)
        rate = LearningRateSchedule(
            lr=settings.lr,
            min_lr=settings.min_lr,
            style=cast(DecayStyle, settings.lr_decay_style),
            decay_samples=decay,
            warmup_samples=settings.lr_warmup.samples(sizes.final, decay),
            warmup_init=settings.lr_warmup.lr_warmup_init,
            wsd_style=cast(WsdStyle, settings.lr_wsd_decay.lr_wsd_decay_style),
            wsd_decay_samples=settings.lr_wsd_decay.samples(sizes.final),
        )
        ramp = settings.weight_decay_ramp
        start = settings.weight_decay if ramp.start_weight_decay is None else ramp.start_weight_decay
        end = settings.weight_decay if ramp.end_weight_decay is None else ramp.end_weight_decay
        style = cast(RampStyle, ramp.weight_decay_incr_style)
        own = None
        if settings.decoupled_lr is not None:
            own = replace(rate, lr=settings.decoupled_lr, min_lr=settings.ends_min_lr)
        return cls(rate, WeightDecaySchedule(start, end, style, ramp_samples=total), own)

    def to_meta(self) -> dict[str, Any]:
        """The JSON form that a checkpoint holds under `META`."""
        return {name: asdict(schedule) for name, schedule in vars(self).items() if schedule is not None}

    @classmethod
    def from_meta(cls, raw: Mapping[str, Any], where: str) -> ParamSchedules:
        """The inverse. Raises CheckpointError."""
        meta = Meta(raw, f"{where}: {META}")
        rate, decay = meta.section("learning_rate"), meta.section("weight_decay")
        own = meta.section("decoupled").build(LearningRateSchedule) if "decoupled" in meta.raw else None
        return cls(rate.build(LearningRateSchedule), decay.build(WeightDecaySchedule), own)

    def facts(self) -> dict[str, Any]:
        """What has an effect, by the name of a field of the optimizer section or of `FLAGS`."""
        rate, decay = self.learning_rate, self.weight_decay
        found: dict[str, Any] = {"lr": rate.lr, "lr_decay_style": rate.style, "warmup": rate.warmup_samples}
        if rate.warmup_samples:
            found["lr_warmup_init"] = rate.warmup_init
        if rate.style != "constant":
            found |= {"min_lr": rate.min_lr, "decay": rate.decay_samples}
        if rate.style == "WSD":
            found |= {"lr_wsd_decay_style": rate.wsd_style, "wsd_decay": rate.wsd_decay_samples}
        found["decoupled_lr"] = None if self.decoupled is None else self.decoupled.lr
        if self.decoupled is not None and rate.style != "constant":
            found["decoupled_min_lr"] = self.decoupled.min_lr
        found |= {"weight_decay_incr_style": decay.style, "end_weight_decay": decay.end}
        if decay.style != "constant":
            found |= {"start_weight_decay": decay.start, "wd_ramp": decay.ramp_samples}
        return found


@dataclass(frozen=True)
class ResolvedSchedules:
    """The schedules that hold."""

    config: Config  # with their settings
    schedules: ParamSchedules
    origin: str  # whose schedules, for the log
    # Flag -> (in the checkpoint's run, in this one), of what the flags override.
    other: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def resolve_schedules(config: Config, world_size: int, start: StartingPoint | None) -> ResolvedSchedules:
    """The schedules that a run follows. Raises ConfigError with a line for each value that flags and checkpoint have
    otherwise, where no flag decides.
    """
    own, settings = ParamSchedules.of(config, world_size), config.checkpoint
    override = settings.schedules.override_opt_param_scheduler
    adopt = settings.schedules.use_checkpoint_opt_param_scheduler
    if start is not None and start.source is not None and start.saved is None and (override or adopt):
        kind = "a Hugging Face model" if start.run is None else "such a checkpoint"
        raise ConfigError(f"{OVERRIDE if override else ADOPT}: {kind} has no schedules; drop it")
    if (
        start is None
        or start.saved is None
        or start.weights_only
        or not settings.load_optim
        or config.training.skip_train
    ):
        return ResolvedSchedules(config, own, "flags")
    if META in start.meta:
        theirs = ParamSchedules.from_meta(start.meta[META], str(start.path))
    else:  # written before schedules were
        theirs = ParamSchedules.of(start.saved, start.world_size)
    ours, saved = own.facts(), theirs.facts()
    differing = [name for name, value in ours.items() if name in saved and saved[name] != value]
    if not differing:
        return ResolvedSchedules(config, own, "checkpoint")
    if override:
        flags = {name: flag_of(_flag(config, name).partition("=")[0].strip("`")) for name in differing}
        other = {flags[name]: (_told(name, saved[name]), _told(name, ours[name])) for name in differing}
        return ResolvedSchedules(config, own, f"flags ({OVERRIDE})", other)
    if adopt:
        return ResolvedSchedules(_adopted(config, start.saved, theirs, world_size), theirs, f"checkpoint ({ADOPT})")
    sizes = config.global_batch_size(world_size), start.saved.global_batch_size(start.world_size)
    batches = f" (batches of {sizes[0]:,}, there {sizes[1]:,})" if sizes[0] != sizes[1] else ""
    raise ConfigError([_difference(config, name, ours[name], saved[name], batches) for name in differing])


def _difference(config: Config, name: str, ours: Any, theirs: Any, batches: str) -> str:
    """One line. batches: what makes the same iterations other samples."""
    fix = f"{OVERRIDE} takes the flags' schedules, {ADOPT} the checkpoint's"
    flag = _flag(config, name)
    if name in LENGTHS:
        return f"{flag}: {LENGTHS[name]} {ours:,} samples, in the checkpoint's run {theirs:,}{batches}; {fix}"
    return f"{flag}: the checkpoint's run has {'none' if theirs is None else show(theirs)}; {fix}"


def _told(name: str, value: Any) -> str:
    return f"{value:,} samples" if name in LENGTHS else "none" if value is None else show(value)


def _flag(config: Config, name: str) -> str:
    """The flag that decides about a value, as typed."""
    values = flat(config.optimizer) | flat(config.training)
    candidates = FLAGS.get(name, (name,))
    if name in ("decay", "wd_ramp"):  # unless said otherwise they are as long as the training
        candidates = (*candidates, "train_iters", "train_samples", "train_tokens")
    set_to = {field: values[field] for field in candidates if values[field] is not None}
    given = next((field for field, value in set_to.items() if value or "decay" in field), candidates[-1])
    return f"`{given}`" if values[given] is None else f"`{given}`={show(values[given])}"


def _adopted(config: Config, saved: Config, theirs: ParamSchedules, world_size: int) -> Config:
    """The configuration with the settings of the checkpoint's schedules."""
    names = [name for name in vars(saved.optimizer) if "lr" in name.split("_") or "weight_decay" in name]
    taken = replace(config.optimizer, **{name: getattr(saved.optimizer, name) for name in names})
    adopted = replace(config, optimizer=taken)
    if ParamSchedules.of(adopted, world_size).learning_rate == theirs.learning_rate:
        return adopted
    rate = theirs.learning_rate  # other batches or another length: only samples say the same
    final = replace(taken.lr_wsd_decay, lr_wsd_decay_iters=None, lr_wsd_decay_samples=rate.wsd_decay_samples or None)
    in_samples = replace(
        taken,
        lr_decay=Decay(lr_decay_samples=rate.decay_samples),
        lr_warmup=Warmup(lr_warmup_samples=rate.warmup_samples, lr_warmup_init=rate.warmup_init),
        lr_wsd_decay=final,
    )
    return replace(config, optimizer=in_samples)
