"""The table of optimizers: a name to a function that builds the update rule over parameter groups.

A group is a dictionary with `params`, `decay` and, for whole-matrix rules, `whole` and `placements`; `pieces` says what
lies in a flat tensor (for rules that keep statistics of a parameter). `lr` and `weight_decay` are set before every step
by whoever owns the optimizer. A new optimizer is one function, one line of the table, and one of
`config/update_rules.py`, which says what it keeps and which parameters it must see in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megalite.errors import ConfigError
from megalite.optim.adafactor import Adafactor
from megalite.optim.adamw import AdamW
from megalite.optim.lion import Lion
from megalite.optim.muon import Muon, ScaleMode
from megalite.optim.rule import UpdateRule
from megalite.optim.sgd import SGD
from megalite.optim.soap import Soap

ParamGroup = dict[str, Any]
AnyOptimizer = UpdateRule | torch.optim.Optimizer


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


def adamw(groups: list[ParamGroup], settings: OptimizerSettings) -> AnyOptimizer:
    """AdamW, torch's fused kernel, or apex's."""
    if settings.optimizer_impl == "apex":
        return apex_adamw(groups, settings)
    return AdamW(
        groups,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        exp_avg_dtype=settings.exp_avg_dtype,
        exp_avg_sq_dtype=settings.exp_avg_sq_dtype,
    )


def apex_adamw(groups: list[ParamGroup], settings: OptimizerSettings) -> AnyOptimizer:
    """NVIDIA apex's FusedAdam. Raises ConfigError where the real apex (with its CUDA extension) is not installed."""
    try:
        from apex.optimizers import FusedAdam

        betas = (settings.adam_beta1, settings.adam_beta2)
        built: AnyOptimizer = FusedAdam(groups, lr=0.0, betas=betas, eps=settings.adam_eps, adam_w_mode=True)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"--optimizer-impl=apex: NVIDIA apex with its CUDA extension is not usable here ({error}); "
            "install it, or drop the flag (torch's own fused kernel is the default)"
        ) from error
    return built


def sgd(groups: list[ParamGroup], settings: OptimizerSettings) -> AnyOptimizer:
    """SGD with momentum; weight decay is added to the gradient, as is usual for it."""
    return SGD(groups, momentum=settings.sgd_momentum)


def lion(groups: list[ParamGroup], settings: OptimizerSettings) -> AnyOptimizer:
    """Lion: one moment, sign updates."""
    return Lion(groups, betas=(settings.lion_beta1, settings.lion_beta2), exp_avg_dtype=settings.exp_avg_dtype)


def muon(groups: list[ParamGroup], settings: OptimizerSettings) -> AnyOptimizer:
    """Muon for the blocks' matrices, AdamW for the rest."""
    return Muon(
        groups,
        momentum=settings.muon_momentum,
        nesterov=settings.muon_use_nesterov,
        ns_steps=settings.muon_num_ns_steps,
        scale_mode=settings.muon_scale_mode,
        extra_scale=settings.muon_extra_scale_factor,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
    )


def soap(groups: list[ParamGroup], settings: OptimizerSettings) -> AnyOptimizer:
    """SOAP for the blocks' matrices, AdamW for the rest."""
    return Soap(
        groups,
        betas=(settings.soap_beta1, settings.soap_beta2),
        eps=settings.soap_eps,
        frequency=settings.soap_precondition_frequency,
        max_dim=settings.soap_max_precond_dim,
        adam_betas=(settings.adam_beta1, settings.adam_beta2),
        adam_eps=settings.adam_eps,
    )


def adafactor(groups: list[ParamGroup], settings: OptimizerSettings) -> AnyOptimizer:
    """Adafactor: a row and a column of second moments for each matrix."""
    return Adafactor(groups, scale_parameter=settings.adafactor_scale_parameter)


OPTIMIZERS: dict[str, Callable[[list[ParamGroup], OptimizerSettings], AnyOptimizer]] = {
    "adam": adamw,
    "sgd": sgd,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
    "soap": soap,
}
