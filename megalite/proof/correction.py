"""`--staleness-correction` once more, around the rules of one process: the formulas of docs/asynchronous.md, sharing
nothing with `megalite.optim`.

    predict          compute weights = W + s d E     E: the step that the moments stand for, else the last one
    error-feedback   Z = W - d D;  Z' = Z + U(Z);  D' = Z' - Z;  W' = Z' + d D'
    nesterov         the step with Nesterov's momentum, as a difference that follows the step without it

W is the master, U the rule's step, d the updates that a gradient lacks, s `--staleness-lookahead`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config import OPTIMIZER_SPECS, Correction, OptimizerConfig
from megalite.inventory import layer_of
from megalite.testing.rates import Rates
from megalite.testing.update_rules import Rule

Named = dict[str, Tensor]
LAST_STEP = "last_step"
"""Its name in a checkpoint."""
Delays = Mapping[str, int]
"""Layer -> the updates that the weights of its gradient lack ("": every layer)."""


@dataclass(frozen=True)
class Numbers:
    """Of one tensor and its newest step. taken: steps, that one counted."""

    settings: OptimizerConfig
    lr: float
    weight_decay: float
    taken: int


def _adamw_expects(w: Tensor, moments: Named, n: Numbers) -> Tensor:
    b1, b2 = n.settings.args.adam_beta1, n.settings.args.adam_beta2
    m, v = moments["exp_avg"] / (1 - b1**n.taken), moments["exp_avg_sq"] / (1 - b2**n.taken)
    return -n.lr * (m / (v.sqrt() + n.settings.args.adam_eps) + n.weight_decay * w)


def _adamw_nesterov(before: Tensor, g: Tensor, moments: Named, n: Numbers) -> Tensor:
    b1, b2, t = n.settings.args.adam_beta1, n.settings.args.adam_beta2, n.taken
    size = (moments["exp_avg_sq"] / (1 - b2**t)).sqrt() + n.settings.args.adam_eps
    taken = moments["exp_avg"] / (1 - b1**t)
    wanted = b1 * moments["exp_avg"] / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
    return -n.lr * (wanted - taken) / size


def _sgd_nesterov(before: Tensor, g: Tensor, moments: Named, n: Numbers) -> Tensor:
    taken = moments["momentum_buffer"]
    wanted = g + n.weight_decay * before + n.settings.args.sgd_momentum * taken
    return -n.lr * (wanted - taken)


ADAMW, SGD, LION = (frozenset(labels) for labels in (("exp_avg", "exp_avg_sq"), ("momentum_buffer",), ("exp_avg",)))
EXPECTS: Mapping[frozenset[str], Callable[[Tensor, Named, Numbers], Tensor]] = {
    ADAMW: _adamw_expects,
    SGD: lambda w, moments, n: -n.lr * moments["momentum_buffer"],
    LION: lambda w, moments, n: -n.lr * (moments["exp_avg"].sign() + n.weight_decay * w),
}
"""The moments of a tensor -> the step that they stand for."""
NESTEROV: Mapping[frozenset[str], Callable[[Tensor, Tensor, Named, Numbers], Tensor]] = {
    ADAMW: _adamw_nesterov,
    SGD: _sgd_nesterov,
}
"""The moments of a tensor -> what Nesterov's momentum adds to a step that began at these weights with this gradient."""


class Corrected(Rule):
    """A rule of one process, corrected. of_gradient: to be set before a step."""

    def __init__(self, rule: Rule, correction: Correction) -> None:
        self.rule, self.correction = rule, correction
        self.parameters, self.decayed, self.settings = rule.parameters, rule.decayed, rule.settings
        self.unsettled, self.magnified, self.count = rule.unsettled, rule.magnified, 0
        self.rates = (Rates(0.0, 0.0), 0.0)
        self.of_gradient: Delays = {}
        whole = OPTIMIZER_SPECS[self.settings.optimizer].whole
        self.whole = {name for name, p in self.parameters.items() if whole is not None and whole(name, p.dim())}
        self.last = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    def step(self, gradients: Named, lr: Rates, weight_decay: float) -> None:
        behind = {name: delay_of(self.of_gradient, name) for name in self.parameters}
        method = self.correction.method
        feedback = behind if method == "error-feedback" else dict.fromkeys(behind, 0)
        for name, p in self.parameters.items():
            p -= feedback[name] * self.last[name]
        before = {name: p.clone() for name, p in self.parameters.items()}
        self.rule.step(gradients, lr, weight_decay)
        self.count, self.rates = self.count + 1, (lr, weight_decay)
        if method == "nesterov":
            moments = self._moments()
            for name in (name for name, delay in behind.items() if delay):
                add = NESTEROV[frozenset(moments[name])]
                self.parameters[name] += add(before[name], gradients[name], moments[name], self._numbers(name))
        for name, p in self.parameters.items():
            self.last[name] = p - before[name]
            p += feedback[name] * self.last[name]

    def pass_over(self, lr: Rates, weight_decay: float) -> None:
        """An update that is not made: the next one will have these numbers."""
        self.rates = (lr, weight_decay)

    def ahead(self, of_weights: Delays) -> Named:
        """What is added to the masters that have seen all steps so far, to compute with them."""
        if self.correction.method != "predict" or not self.count:
            return {}
        moments, found = self._moments(), {}
        for name, p in self.parameters.items():
            steps = self.correction.lookahead[0 if name in self.whole else 1] * delay_of(of_weights, name)
            if self._foreseen(name, moments):
                expected = EXPECTS[frozenset(moments[name])](p, moments[name], self._numbers(name))
            else:
                expected = self.last[name]
            found[name] = steps * expected
        return found

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        yield from self.rule.moments()
        method, moments = self.correction.method, self._moments()
        for name, last in self.last.items():
            if method == "error-feedback" or (method == "predict" and not self._foreseen(name, moments)):
                yield LAST_STEP, name, last

    def _moments(self) -> dict[str, Named]:
        found: dict[str, Named] = {name: {} for name in self.parameters}
        for label, name, values in self.rule.moments():
            found[name][label] = values
        return found

    def _foreseen(self, name: str, moments: Mapping[str, Named]) -> bool:
        """Whether the tensor has moments that a step can be told from."""
        return name not in self.whole and frozenset(moments[name]) in EXPECTS

    def _numbers(self, name: str) -> Numbers:
        lr, weight_decay = self.rates
        return Numbers(self.settings, lr.of(name), weight_decay if name in self.decayed else 0.0, self.count)


def delay_of(delays: Delays, name: str) -> int:
    """Of a tensor's layer."""
    return delays.get(layer_of(name), delays.get("", 0))
