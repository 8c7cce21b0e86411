"""What each `--optimizer` keeps and needs, without torch: read by the rules, the planner and `megalite.optim`, which
builds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.config.optimizer import OptimizerConfig

_WIDE = "fp32"
"""As wide as the master."""


def _blocks_matrix(name: str, dims: int) -> bool:
    return name.startswith("layers.") and dims >= 2


@dataclass(frozen=True)
class OptimizerSpec:
    """One `--optimizer`.

    moments: dtypes of the numbers that it keeps for an element ("fp32": as wide as the master).
    whole: (logical name, dimensions) -> whether the parameter must lie on one rank in one piece; it then has one
    moment as wide as the master. None: any slice of any parameter will do.
    statistics: for each matrix it keeps a number for each row and each column instead.
    settings: fields of the optimizer section that other rules refuse.
    high_lr: a learning rate above it is unusual, None if that depends on the model.
    correction, lookahead: what 2BW does about its delay unless told otherwise, and how far `predict` looks
    (docs/asynchronous.md has the measurements). nesterov: why its momentum can not be taken as Nesterov did.
    """

    moments: Callable[[OptimizerConfig], tuple[str, ...]]
    whole: Callable[[str, int], bool] | None = None
    statistics: bool = False
    settings: tuple[str, ...] = ()
    high_lr: float | None = None
    correction: str = "none"
    lookahead: float = 1.0
    nesterov: str | None = None

    def most_moments(self, settings: OptimizerConfig) -> int:
        """How many moments most elements of a model have: those of the blocks' matrices."""
        return 1 if self.whole is not None else len(self.moments(settings))


OPTIMIZER_SPECS: Mapping[str, OptimizerSpec] = MappingProxyType(
    {
        "adam": OptimizerSpec(
            lambda settings: (settings.exp_avg_dtype, settings.exp_avg_sq_dtype),
            settings=("exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_impl"),
            high_lr=0.1,
            correction="predict",
            lookahead=2.0,
        ),
        "sgd": OptimizerSpec(lambda settings: (_WIDE,) if settings.args.sgd_momentum > 0 else ()),
        "lion": OptimizerSpec(
            lambda settings: (settings.exp_avg_dtype,),
            settings=("exp_avg_dtype",),
            nesterov="its update weighs the newest gradient by itself",
        ),
        "muon": OptimizerSpec(
            lambda settings: (_WIDE, _WIDE), whole=_blocks_matrix, nesterov="its momentum is Nesterov's already"
        ),
        "adafactor": OptimizerSpec(lambda settings: (), statistics=True, nesterov="it has no momentum"),
    }
)
"""Name -> UpdateRule. Muon leaves what is no matrix of a block to AdamW, whose moments are wide there."""
