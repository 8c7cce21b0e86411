"""The update rule of an optimizer, corrected for the age of its gradients."""

from __future__ import annotations

from typing import Any

from megalite.config import Correction, OptimizerConfig
from megalite.optim import CORRECTIONS, OPTIMIZERS, Delay, UpdateRule
from megalite.parallel.zero import MakeOptimizer, ParamGroup


def rule_maker(settings: OptimizerConfig, correction: Correction, delay: Delay | None = None) -> MakeOptimizer:
    """Parameter groups -> the rule that `settings` name. delay: of the gradients; None: they are never late."""

    def make(groups: list[ParamGroup]) -> Any:
        rule = OPTIMIZERS[settings.optimizer](groups, settings)
        if delay is None or not isinstance(rule, UpdateRule):
            return rule
        return CORRECTIONS[correction.method](rule, delay, correction.lookahead)

    return make
