"""An elementwise update rule over a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.comm import Axis
from megalite.config import Rates
from megalite.inventory import ALIGNMENT, align


class Step(NamedTuple):
    """Numbers of one step of the optimizer. weight_decay: where the parameter decays."""

    lr: float
    weight_decay: float


class RowRule:
    """The run's update rule, for a parameter of which any part may be updated by itself.

    make_optimizer: builds the rule from parameter groups (`parallel.zero`).
    decays: whether weight decay applies. rates: its factor of epsilon.
    width: elements of a row in scratch memory: rows begin at whole vector registers there, as in flat buffers, so that
        every element is rounded alike.
    only_decays: a step whose gradient and moments are 0 does what `decay` does.
    kept: name -> dtype of what the rule keeps for each element.
    """

    def __init__(
        self,
        make_optimizer: Callable[[list[dict[str, Any]]], Any],
        *,
        columns: int,
        decays: bool,
        only_decays: bool,
        dtype: torch.dtype,
        rates: Rates | None = None,
    ) -> None:
        self.width, self.dtype, self.only_decays = align(columns), dtype, only_decays
        probe = torch.zeros(ALIGNMENT, dtype=dtype)
        group = {"params": [probe], "decay": decays, "whole": False, "placements": [], "parameters": [], "pieces": [[]]}
        group["rates"] = rates or Rates()
        self._rule = make_optimizer([{**group, "shard_axis": Axis.single("shard"), "cut_axes": ()}])
        self._rule.steps = -1
        probe.grad = torch.zeros_like(probe)
        self._rule.step()
        made = self._rule.state[probe] if probe in self._rule.state else {}
        self.kept: dict[str, torch.dtype] = {
            name: value.dtype
            for name, value in made.items()
            if isinstance(value, Tensor) and name != "step" and value.numel() == probe.numel()
        }
        self._decays = decays

    def step(self, rows: Tensor, gradient: Tensor, kept: Mapping[str, Tensor], numbers: Step, taken: int) -> None:
        """Updates `rows` and what is kept of them, in place; `[n, width]` each. taken: steps before this one."""
        rule = self._rule
        (group,) = rule.param_groups
        group["params"], group["lr"] = [rows], numbers.lr
        group["weight_decay"] = numbers.weight_decay if self._decays else 0.0
        rule.state.clear()
        if kept:
            rule.state[rows] = {"step": torch.full((), float(taken)), **kept}
        rule.steps = taken
        rows.grad = gradient
        rule.step()
        rows.grad = None
        rule.state.clear()

    def decay(self, rows: Tensor, numbers: Step) -> None:
        """Weight decay alone."""
        if self._decays and numbers.weight_decay:
            rows.mul_(1 - numbers.lr * numbers.weight_decay)
