"""The table of optimizers: the name on the command line -> what builds the update rule over parameter groups."""

from collections.abc import Callable

import torch

from megalite.config import OptimizerConfig
from megalite.errors import ConfigError
from megalite.optim.adafactor import Adafactor
from megalite.optim.adamw import AdamW
from megalite.optim.kfac import Kfac
from megalite.optim.muon import Muon
from megalite.optim.one_moment import SGD, Lion
from megalite.optim.rule import ParamGroup, UpdateRule
from megalite.optim.shampoo import Shampoo
from megalite.optim.soap import Soap

AnyOptimizer = UpdateRule | torch.optim.Optimizer


def adamw(groups: list[ParamGroup], settings: OptimizerConfig) -> AnyOptimizer:
    """AdamW: torch's fused kernel, or NVIDIA apex's FusedAdam.

    Raises ConfigError where the real apex (with its CUDA extension) is wanted and not installed.
    """
    if settings.optimizer_impl != "apex":
        return AdamW(groups, settings)
    try:
        from apex.optimizers import FusedAdam

        args = settings.args
        betas = (args.adam_beta1, args.adam_beta2)
        built: AnyOptimizer = FusedAdam(groups, lr=0.0, betas=betas, eps=args.adam_eps, adam_w_mode=True)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"`optimizer_impl`=apex: NVIDIA apex with its CUDA extension is not usable here ({error}); "
            "install it, or drop the flag (torch's own fused kernel is the default)"
        ) from error
    return built


OPTIMIZERS: dict[str, Callable[[list[ParamGroup], OptimizerConfig], AnyOptimizer]] = {
    "adam": adamw,
    "sgd": SGD,
    "lion": Lion,
    "adafactor": Adafactor,
    "muon": Muon,
    "soap": Soap,
    "shampoo": Shampoo,
    "kfac": Kfac,
}
