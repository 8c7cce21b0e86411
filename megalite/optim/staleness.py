"""Corrections of gradients that are a few updates old (`--staleness-correction`).

An asynchronous pipeline computes the gradient of an update on weights that have not seen the `delay` updates before it:
1 in 2BW, p-1-stage in PipeDream. W is the master, U the update rule's step, d the delay.

    predict          compute weights of a version:  W + s d (the step expected next)         s: --staleness-lookahead
                     SpecTrain (arXiv 1809.02839), XPipe (1911.04610), PipeMare (1910.05124). The expected step is what
                     the moments say (`UpdateRule.expected_step`), else the last one: linear extrapolation
    error-feedback   what a step would have been with a fresh gradient is known d updates later; the difference is made
                     up for: Z = W - d D,  Z' = Z + U(Z),  D' = Z' - Z,  W' = Z' + d D'        after arXiv 2606.30634
    nesterov         the newest gradient counts once more beside the moment: NAdam's rule, or SGD's with Nesterov
                     momentum; after arXiv 2505.01099

A correction is an update rule around another, and sees nothing but its tensors: flat slices or whole matrices, on any
device. The masters are what is evaluated, saved and exported; `write_compute_weights` alone knows of extrapolated ones.
"""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.optim.rule import ParamGroup, UpdateRule, pieces

LAST_STEP = "last_step"
"""The state that holds what the last step added to a tensor, in the master's dtype."""


@dataclass
class Delay:
    """Counts the updates that are missing from the weights that a gradient of this rank is computed on.

    updates: once the pipeline never drains. flush_steps: first iterations, which run without delay. passed_over:
    iterations that make no update. of_gradient, of_weights: of the update that is being made, and of the batches that
    will run on the weights that it writes. learning_rate, weight_decay: of the newest update; decoupled_lr: of the
    groups that have a learning rate of their own, None: the same.
    """

    updates: int
    flush_steps: int = 0
    passed_over: Container[int] = ()
    of_gradient: int = 0
    of_weights: int = 0
    learning_rate: float = 0.0
    weight_decay: float = 0.0
    decoupled_lr: float | None = None

    def begin(self, iteration: int) -> None:
        """The update of this iteration (the first is 1) comes next."""
        following = iteration + 1
        while following in self.passed_over:
            following += 1
        self.of_gradient, self.of_weights = self.at(iteration), self.at(following)

    def at(self, iteration: int) -> int:
        return self.updates if iteration > self.flush_steps else 0


class Corrected(UpdateRule):
    """An update rule inside another one, which shares its groups and its state. lookahead: of `Predict`. last_steps: of
    the tensors whose last step is kept; a part of their state."""

    def __init__(self, rule: UpdateRule, delay: Delay, lookahead: tuple[float, float]) -> None:
        self.rule, self.delay, self.lookahead = rule, delay, lookahead
        self.param_groups, self.state, self.talks = rule.param_groups, rule.state, rule.talks
        kept = [p for group in rule.param_groups for p in group["params"] if self.keeps_step(group)]
        self.last_steps = {p: torch.zeros_like(p) for p in kept}

    def keeps_step(self, group: ParamGroup) -> bool:
        return False

    def statistics(self) -> Iterator[Any]:
        """The statistics of the rule inside."""
        yield from self.rule.statistics()

    def write_compute_weights(self, master: Tensor, target: Tensor) -> None:
        """target = what the pipeline computes with after this update."""
        target.copy_(master, non_blocking=True)

    def _step_inside(self) -> None:
        self.rule.found_inf, self.rule.steps = self.found_inf, self.steps
        self.rule.step()
        self.steps += 1

    def _step_and_keep(self) -> None:
        """A step of the rule inside; `last_steps` hold what it adds. Until then they hold the tensors' negatives: the
        tensors need no copy."""
        for p, last in self._kept():
            self.write(last, -p)
        self._step_inside()
        for p, last in self._kept():
            self.write(last, last + p)
        for whole, step in self.last_steps.items():
            self.state[whole][LAST_STEP] = step

    def _kept(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Tensors whose last step is kept and these steps, flat and in pieces."""
        for p, last in self.last_steps.items():
            for piece in pieces(p):
                yield p.view(-1)[piece], last.view(-1)[piece]


class Predict(Corrected):
    """Compute weights are extrapolated by the steps that are missing from them.

    lookahead: times the delay; of the rule's own tensors, and of those that it leaves to AdamW, which gains by looking
    further."""

    def __init__(self, rule: UpdateRule, delay: Delay, lookahead: tuple[float, float]) -> None:
        super().__init__(rule, delay, lookahead)
        self._group = {p: group for group in rule.param_groups for p in group["params"]}

    def keeps_step(self, group: ParamGroup) -> bool:
        return not self.rule.foresees(group)

    @torch.no_grad()
    def step(self) -> None:
        self._step_and_keep()

    @torch.no_grad()
    def write_compute_weights(self, master: Tensor, target: Tensor) -> None:
        group, delay, (own, rest) = self._group[master], self.delay, self.lookahead
        ahead = (own if group["whole"] else rest) * delay.of_weights
        rates = group["rates"]
        lr = rates.lr * (
            delay.learning_rate if delay.decoupled_lr is None or not rates.decoupled else delay.decoupled_lr
        )
        if not ahead or not lr:
            super().write_compute_weights(master, target)
            return
        weight_decay = delay.weight_decay * rates.decay if group["decay"] else 0.0
        weights, out = master.view(-1), target.view(-1)
        for piece in pieces(master):
            if master in self.last_steps:
                step = self.last_steps[master].view(-1)[piece]
            else:
                step = self.rule.expected_step(master, piece, group, lr, weight_decay)
            out[piece].copy_(torch.add(weights[piece], step, alpha=ahead))


class ErrorFeedback(Corrected):
    """The master moves on by the difference between a step and the one before it, times the delay."""

    def keeps_step(self, group: ParamGroup) -> bool:
        return True

    @torch.no_grad()
    def step(self) -> None:
        delay = float(self.delay.of_gradient)
        for p, last in self._kept():
            self.write(p, p.sub(last, alpha=delay))
        self._step_and_keep()
        for p, last in self._kept():
            self.write(p, p.add(last, alpha=delay))


class Nesterov(Corrected):
    """Switches a rule with momentum to Nesterov momentum where the gradient is delayed."""

    def step(self) -> None:
        for group in self.param_groups:
            group["nesterov"] = self.delay.of_gradient > 0
        self._step_inside()


CORRECTIONS: dict[str, Callable[[UpdateRule, Delay, tuple[float, float]], UpdateRule]] = {
    "none": lambda rule, delay, lookahead: rule,
    "predict": Predict,
    "error-feedback": ErrorFeedback,
    "nesterov": Nesterov,
}
