"""Exponential moving average of the masters (`--ema-decay`), as a part of the optimizer's state.

    n-th step:  average += (1 - d) (master - average),   d = min(decay, n / (n + 9))

It begins as a copy of the masters, and first forgets faster, so that they do not weigh on it for long (as TensorFlow's
ExponentialMovingAverage). As a moment it lies where the masters lie, and in checkpoints as `optimizer/ema/<name>`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megalite.optim.rule import UpdateRule

EMA = "ema"
"""The state that holds the average of a tensor, in the master's dtype."""


class Averaged(UpdateRule):
    """An update rule, whose groups and state it shares, and an average of what its steps make of the tensors."""

    def __init__(self, rule: UpdateRule, decay: float) -> None:
        self.rule, self.decay = rule, decay
        self.param_groups, self.state = rule.param_groups, rule.state
        self.talks, self.divides = rule.talks, rule.divides

    def __getattr__(self, name: str) -> Any:
        """What else the rule has: compute weights that it corrects, steps that it keeps."""
        return getattr(self.__dict__["rule"], name)

    def statistics(self) -> Iterator[Any]:
        """The statistics of the rule inside."""
        yield from self.rule.statistics()

    @torch.no_grad()
    def step(self) -> None:
        """A step of the rule, and of the averages."""
        first, count = self.steps < 0, self.steps + 1
        self.rule.found_inf, self.rule.grad_scale, self.rule.steps = self.found_inf, self.grad_scale, self.steps
        self.rule.step()
        weight = 1.0 - min(self.decay, count / (count + 9))
        for p in [p for group in self.param_groups for p in group["params"]]:
            if first:
                self.state[p][EMA] = p.clone()
                continue
            taken = weight if self.found_inf is None else (1 - self.found_inf).to(p.dtype) * weight
            self.state[p][EMA].lerp_(p, taken)  # a tensor that was not stepped is finite, so that 0 times it is 0
