"""The optimizer of a rank: its update rule, corrected for the age of its gradients, and where its state lies."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megalite.config import Correction, OptimizerConfig
from megalite.optim import CORRECTIONS, OPTIMIZERS, Delay, UpdateRule
from megalite.parallel.zero import DelayedOptimizer, MakeOptimizer, ParamGroup, ShardedOptimizer


def rule_maker(settings: OptimizerConfig, correction: Correction, delay: Delay | None = None) -> MakeOptimizer:
    """Parameter groups -> the rule that `settings` name. delay: of the gradients; None: they are never late."""

    def make(groups: list[ParamGroup]) -> Any:
        rule = OPTIMIZERS[settings.optimizer](groups, settings)
        if not isinstance(rule, UpdateRule):
            return rule
        corrected = rule if delay is None else CORRECTIONS[correction.method](rule, delay, correction.lookahead)
        corrected.ema_decay = settings.ema_decay
        return corrected

    return make


def sharded_maker(
    settings: OptimizerConfig,
    correction: Correction,
    delay: Delay,
    *,
    fraction: float,
    file_fraction: float,
    kind: Callable[..., ShardedOptimizer] | None = None,
) -> Callable[..., ShardedOptimizer]:
    """(Buffers of all stages, norm_axis) -> optimizer.

    fraction: part of the masters and moments that is off the device. file_fraction: part of them that is in files.
    kind: None: as the settings say.
    """
    offload = settings.offload
    return partial(
        kind or (DelayedOptimizer if offload.delayed_parameter_update else ShardedOptimizer),
        make_optimizer=rule_maker(settings, correction, delay),
        offload_fraction=fraction,
        offload_path=offload.optimizer_offload_path if file_fraction else None,
        file_fraction=file_fraction,
        store_param_remainders=settings.store_param_remainders,
    )
