"""What an update rule is: parameter groups, state by tensor, `step`. `torch.optim.Optimizer` is one, too.

Ours do not derive from it: its constructor imports torch's compiler, 70 MB and most of a second on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

ParamGroup = dict[str, Any]
"""Tensors and what is said of them (`parallel.zero.param_groups`), and the `lr` and `weight_decay` of the next step."""

ScaleMode = Literal["spectral", "shape_scaling", "unit_rms_norm"]


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of every optimizer of the table (flags of the same names)."""

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    lion_beta1: float = 0.95
    lion_beta2: float = 0.98
    muon_momentum: float = 0.95
    muon_use_nesterov: bool = True
    muon_num_ns_steps: int = 5
    muon_scale_mode: ScaleMode = "spectral"
    muon_extra_scale_factor: float = 0.2
    soap_beta1: float = 0.95
    soap_beta2: float = 0.95
    soap_eps: float = 1e-8
    soap_precondition_frequency: int = 10
    soap_max_precond_dim: int = 10000
    adafactor_scale_parameter: bool = False
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    optimizer_impl: str = "torch"


class UpdateRule:
    """Groups with `defaults` filled in, and an empty state. Subclasses define `step`."""

    def __init__(self, groups: list[ParamGroup], **defaults: Any) -> None:
        self.param_groups: list[ParamGroup] = [{"lr": 0.0, "weight_decay": 0.0, **defaults, **g} for g in groups]
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)

    def step(self) -> None:
        """Updates every tensor that has a `.grad`."""
        raise NotImplementedError

    def with_gradients(self) -> Iterator[tuple[Tensor, Tensor, ParamGroup, int]]:
        """(Tensor, its gradient, its group, its number in the group) of every tensor that has a gradient."""
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is not None:
                    yield p, p.grad, group, index

    def statistics(self) -> Iterator[Any]:
        """State that is not one number an element (`megalite.comm.Statistic`)."""
        yield from ()

    def foresees(self, group: ParamGroup) -> bool:
        """Whether the moments of the group's tensors tell what the next step will be."""
        return False

    def expected_step(self, p: Tensor, piece: slice, group: ParamGroup, lr: float, weight_decay: float) -> Tensor:
        """What a step adds to `p.view(-1)[piece]` if the next gradient is as its moments expect. Only where `foresees`
        says so, after a step at least."""
        raise NotImplementedError


def moment_like(p: Tensor, dtype: torch.dtype) -> Tensor:
    """A moment of zeros; fp32 means as wide as the master."""
    return torch.zeros_like(p, dtype=p.dtype if dtype == torch.float32 else dtype)
