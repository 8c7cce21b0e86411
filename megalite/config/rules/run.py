"""Rules of a run: length, precision, learning rate, weight decay."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.root import Config
from megalite.config.training import TrainingLength
from megalite.config.values import show
from megalite.schedule import find

__all__ = ["learning_rate", "length", "precision", "update_rule", "weight_decay"]


def length(config: Config, world_size: int) -> Iterator[str]:
    """How long the training is, and what must fit into it."""
    if config.training.length == TrainingLength() and not config.training.skip_train:
        yield "--train-iters: required (or --train-samples, --train-tokens, or --skip-train to only evaluate)"
    if config.logging.profile and config.logging.profile_step_end <= config.logging.profile_step_start:
        yield (
            f"--profile-step-end={config.logging.profile_step_end}: not above "
            f"--profile-step-start={config.logging.profile_step_start}"
        )


def precision(config: Config, world_size: int) -> Iterator[str]:
    """Number formats and loss scaling."""
    training = config.training
    if training.loss_scale is not None and not training.precision.fp16:
        yield f"--loss-scale={show(training.loss_scale)}: needs --fp16"
    if training.min_loss_scale > training.initial_loss_scale:
        smallest, first = show(training.min_loss_scale), show(training.initial_loss_scale)
        yield f"--min-loss-scale={smallest}: above --initial-loss-scale={first}"
    if config.parallel.grad_reduce_in_bf16 and not training.precision.bf16:
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
        decay, train = getattr(optimizer, f"lr_decay_{unit}"), getattr(training.length, f"train_{unit}")
        flag, end = (f"--lr-decay-{unit}", decay) if decay is not None else (f"--train-{unit}", train)
        if end is not None and warmup and warmup >= end:
            yield f"--lr-warmup-{unit}={warmup}: not below {flag}={end}; use {end // 10}, or train longer"
    yield from _wsd(config)


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


def update_rule(config: Config, world_size: int) -> Iterator[str]:
    """Which settings belong to which optimizer."""
    optimizer = config.optimizer
    name = optimizer.optimizer
    kinds = {
        "--exp-avg-dtype": (optimizer.exp_avg_dtype, "fp32", ("adam", "lion")),
        "--exp-avg-sq-dtype": (optimizer.exp_avg_sq_dtype, "fp32", ("adam",)),
        "--optimizer-impl": (optimizer.optimizer_impl, "torch", ("adam",)),
    }
    for flag, (value, default, users) in kinds.items():
        if value != default and name not in users:
            yield f"{flag}={value}: not with --optimizer={name}; it belongs to {' and '.join(users)}"
    if optimizer.optimizer_impl == "apex" and (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype) != ("fp32", "fp32"):
        yield "--optimizer-impl=apex: keeps both moments in fp32; drop --exp-avg-dtype and --exp-avg-sq-dtype"
    if optimizer.store_param_remainders:
        if not config.training.precision.bf16:
            yield "--store-param-remainders: needs --bf16 (only a bf16 weight is the upper half of its master)"
        if optimizer.optimizer_cpu_offload:
            yield "--store-param-remainders: excludes --optimizer-cpu-offload; give one of them"
        if find(config.parallel.schedule).asynchronous:
            yield (
                f"--store-param-remainders: not with --pipeline-schedule={config.parallel.schedule}, which writes the "
                "weights of an update elsewhere than it reads them"
            )
    if optimizer.optimizer_offload_fraction != 1 and not optimizer.optimizer_cpu_offload:
        fraction = show(optimizer.optimizer_offload_fraction)
        yield f"--optimizer-offload-fraction={fraction}: needs --optimizer-cpu-offload"
