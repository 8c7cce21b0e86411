"""The table of optimizers: a name to a function that builds the update rule over parameter groups.

A group is a dictionary with `params`, `decay` and, for whole-matrix rules, `whole` and `placements`; `lr` and
`weight_decay` are set before every step by whoever owns the optimizer. A new optimizer is one function and one line of
the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ParamGroup = dict[str, Any]


@dataclass(frozen=True)
class Hyperparameters:
    """Settings of every optimizer of the table (flags of the same names)."""

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9


Builder = Callable[[list[ParamGroup], Hyperparameters], torch.optim.Optimizer]


def adamw(groups: list[ParamGroup], settings: Hyperparameters) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), one fused kernel."""
    betas = (settings.adam_beta1, settings.adam_beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=settings.adam_eps, weight_decay=0.0, fused=True)


def sgd(groups: list[ParamGroup], settings: Hyperparameters) -> torch.optim.Optimizer:
    """SGD with momentum; weight decay is added to the gradient, as is usual for it."""
    return torch.optim.SGD(groups, lr=0.0, momentum=settings.sgd_momentum, weight_decay=0.0)


OPTIMIZERS: dict[str, Builder] = {"adam": adamw, "adamw": adamw, "sgd": sgd}
