"""The interface of an update rule: parameter groups, state by tensor, `step`. `torch.optim.Optimizer` has it, too.

Our rules do not derive from that class: its constructor imports torch's compiler, which costs every rank 70 MB and most
of a second.

Whether a step is taken is decided on the device: with `found_inf` (torch's name) a rule computes its step in any case,
and keeps the old values where `found_inf` is 1. So the host never waits for a norm.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megalite.config import Rates
from megalite.inventory import STEP_PIECE

EMA = "ema"
"""The state that holds the average of a tensor (`--ema-decay`), in the master's dtype."""
ParamGroup = dict[str, Any]
"""Tensors and their metadata (`parallel.zero.ParamGroup`), with `lr` and `weight_decay` of the next step."""


def pieces(p: Tensor) -> Iterator[slice]:
    """Slices of `p.view(-1)`, so that what a step needs beside a long tensor stays small."""
    for begin in range(0, p.numel(), STEP_PIECE):
        yield slice(begin, begin + STEP_PIECE)


class UpdateRule:
    """Groups with `defaults` filled in, and an empty state. Subclasses define `step`.

    talks: whether a step exchanges messages with other ranks. ema_decay: of the averages of the tensors, which a
    checkpoint holds as `optimizer/ema/<name>`; None: it keeps none.

    Set before each step:

    found_inf: 0-dim fp32 on the tensors' device: 1 to leave parameters and state unchanged. None: the step is taken.
    grad_scale: what gradients must be divided by (0-dim fp32), where the rule `divides`; else None.
    steps: number of steps taken so far, as known to the host; -1 for the first call, which sees zero gradients and only
        allocates the state.
    """

    _step_supports_amp_scaling = True  # the name by which torch's fused optimizers say that they know `found_inf`
    divides = False
    talks = False
    ema_decay: float | None = None
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    steps = 0

    def __init__(self, groups: list[ParamGroup], **defaults: Any) -> None:
        self.param_groups: list[ParamGroup] = [{"lr": 0.0, "weight_decay": 0.0, **defaults, **g} for g in groups]
        for group in self.param_groups:
            if "eps" in group:
                group["eps"] *= group.get("rates", Rates()).eps
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)

    def step(self) -> None:
        """Updates every tensor that has a `.grad`."""
        raise NotImplementedError

    @torch.no_grad()
    def average(self, steps: int) -> None:
        """After a step, `steps` of which were taken before:  average += (1 - d) (tensor - average), of the n-th step
        with d = min(ema_decay, n / (n + 9)). It begins as a copy and first forgets faster, so that the first values do
        not weigh on it for long (as TensorFlow's ExponentialMovingAverage)."""
        if self.ema_decay is None:
            return
        weight = 1.0 - min(self.ema_decay, (steps + 1) / (steps + 10))
        for p in [p for group in self.param_groups for p in group["params"]]:
            if steps < 0:
                self.state[p][EMA] = p.clone()
                continue
            taken = weight if self.found_inf is None else (1 - self.found_inf).to(p.dtype) * weight
            self.state[p][EMA].lerp_(p, taken)  # a tensor that was not stepped is finite, so that 0 times it is 0

    def write(self, target: Tensor, new: Tensor) -> None:
        """target = new, unless the step is skipped."""
        if self.found_inf is None:
            target.copy_(new)
        else:
            torch.where(self.found_inf > 0, target, new.to(target.dtype), out=target)

    def descend(self, p: Tensor, step: Tensor, group: ParamGroup, factor: float = 1.0) -> None:
        """p -= lr (factor step + weight_decay p), unless the step is skipped."""
        decayed = p * (1.0 - group["lr"] * group["weight_decay"])
        self.write(p, decayed.add_(step, alpha=-group["lr"] * factor))

    def count(self, steps: Tensor) -> None:
        """steps += 1, unless the step is skipped."""
        steps += 1 if self.found_inf is None else 1 - self.found_inf

    def with_gradients(self) -> Iterator[tuple[Tensor, Tensor, ParamGroup, int]]:
        """(Tensor, gradient, group, index in the group) of every tensor that has a gradient."""
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is not None:
                    yield p, p.grad, group, index

    def statistics(self) -> Iterator[Any]:
        """State that is not one number per element (`megalite.comm.Statistic`)."""
        yield from ()

    def foresees(self, group: ParamGroup) -> bool:
        """Whether `expected_step` can be computed from the moments of the group's tensors."""
        return False

    def expected_step(self, p: Tensor, piece: slice, group: ParamGroup, lr: float, weight_decay: float) -> Tensor:
        """The step that `p.view(-1)[piece]` makes next if its gradient is what the moments expect; see `foresees`."""
        raise NotImplementedError


def moment_like(p: Tensor, kept: str) -> Tensor:
    """A moment of zeros. kept: `fp32` (as wide as the master), `bf16` or `fp16`."""
    dtypes = {"fp32": p.dtype, "bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.zeros_like(p, dtype=dtypes[kept])
