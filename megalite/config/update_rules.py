"""What each `--optimizer` keeps and needs, without torch: read by the rules, the planner and `megalite.optim`, which
builds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.config.optimizer import OptimizerConfig

Shape = tuple[int, ...]

_WIDE = "fp32"
"""As wide as the master."""


def _blocks_matrix(name: str, dims: int) -> bool:
    matrix = name.endswith(("weight", "lora_a", "lora_b"))  # a bias of two rows is none
    return name.startswith("layers.") and matrix and dims >= 2


def _square_enough(name: str, dims: int) -> bool:
    """A router has few rows, and these add up to nearly nothing: its eigenvectors are those that rounding makes."""
    return _blocks_matrix(name, dims) and not name.endswith("router.weight")


def _moments_and_bases(settings: OptimizerConfig, local: Shape, whole: Shape) -> int:
    """Two moments; of each side of a matrix that is here its preconditioner and its basis, whole."""
    sides = [n for n in whole[-2:] if n <= settings.args.soap_max_precond_dim]
    return 2 * math.prod(local) + 2 * math.prod(local[:-2]) * sum(n * n for n in sides)


def _newton_schulz(settings: OptimizerConfig, local: Shape, whole: Shape, half: float) -> float:
    """Of Muon's step of a matrix or a stack of them: momentum, update, and the iteration with its Gram matrices."""
    rows, columns = whole[-2:]
    stack, numel = math.prod(local[:-2]), math.prod(local)
    gathered, gram = stack * rows * columns, stack * min(rows, columns) ** 2
    kept = 2.0 * numel + (gathered if gathered != numel else 0.0)
    return kept + half * max(4.0 * gathered + gram, 2.0 * gathered + 4.0 * gram)


def _both_sides(settings: OptimizerConfig, local: Shape, whole: Shape, half: float) -> float:
    """Of SOAP's: eigenvectors in fp64 at first, then preconditioners and bases that turn."""
    rows, columns = whole[-2:]
    stack, limit = math.prod(local[:-2]), settings.args.soap_max_precond_dim
    left, right = (stack * n * n * (n <= limit) for n in (rows, columns))
    gathered = stack * rows * columns
    return max(9.0 * max(left, right), 5.0 * gathered, 3.0 * gathered + max(6.0 * left, 6.0 * right + left))


def _moments_and_roots(settings: OptimizerConfig, local: Shape, whole: Shape) -> int:
    """Shampoo's two moments; of each side the preconditioners of its blocks and their roots."""
    sides = sum(n * min(n, settings.args.shampoo_max_precond_dim) for n in whole[-2:])
    return 2 * math.prod(local) + 2 * math.prod(local[:-2]) * sides


def _factors(settings: OptimizerConfig, whole: Shape) -> int:
    """Of K-FAC: the covariances of a layer's outputs (of each projection's) and inputs."""
    rows, columns = whole[-2:]
    return math.prod(whole[:-2]) * rows**2 + columns**2


def _inverses(settings: OptimizerConfig, local: Shape, whole: Shape, half: float) -> float:
    """Of K-FAC's step: new means, their inverses in fp64, and with both the preconditioned gradient."""
    numel, gathered = math.prod(local), math.prod(whole)
    right, left = whole[-1] ** 2, math.prod(whole[:-2]) * whole[-2] ** 2
    means = left + right
    inverted = means + max(5.0 * right, right + 5.0 * left)
    return max(2.0 * means, inverted, 2.0 * means + 3.0 * gathered + (gathered if gathered != numel else 0.0))


def _roots(settings: OptimizerConfig, local: Shape, whole: Shape, half: float) -> float:
    """Of Shampoo's step: moments and Adam's step, where they are cut with the gradient gathered; then of a side its
    preconditioner, its root and in fp64 eigenvectors of a block, or the product with the root; then the update."""
    numel, stack = math.prod(local), math.prod(local[:-2])
    gathered, peak = 1.0 * stack * math.prod(whole[-2:]), 0.0
    before = kept = 0.0
    for n in whole[-2:]:
        block = min(n, settings.args.shampoo_max_precond_dim)
        root, side = (8.0 if n >= 2 * block else 6.0) * stack * block**2, 1.0 * stack * n * block
        peak = max(peak, before + kept + side + stack * block**2, before + 2 * side + root)
        peak = max(peak, before + 2 * side + gathered * (1 + (block < n)))
        before, kept = gathered, 2 * side
    return 3.0 * numel + (3.0 * gathered if gathered != numel else 0.0) + max(peak, 3.0 * gathered + kept)


@dataclass(frozen=True)
class OptimizerSpec:
    """One `--optimizer`.

    moments: dtypes of the numbers that it keeps for an element ("fp32": as wide as the master).
    whole: (logical name, dimensions) -> whether the parameter must lie on one rank in one piece. None: any slice of any
    parameter will do.
    of_whole: (settings, local shape, shape without tensor parallelism) -> numbers as wide as the master that are kept
    of such a parameter. whole_moments: how many of them are as large as it.
    step, step_nesterov: numbers as wide as the master that come and go in the step of each element of a tensor, and
    how many more a Nesterov correction takes. of_step: (settings, local shape, shape without tensor parallelism, bytes
    of a number of Newton-Schulz over those of a master) -> numbers that do of a parameter that lies in one piece.
    of_tap: (settings, shape without tensor parallelism) -> numbers that a batch adds up of what such a parameter's
    gradient is made of, on every rank with `kfac_factors`=all; None: it does not look at that.
    orthogonal: it brings the singular values of a matrix to 1, by products.
    statistics: for each matrix it keeps a number for each row and each column instead.
    settings: fields of the optimizer section that other rules refuse.
    only_decays: a step of any slice whose gradient and moments are 0 multiplies it by 1 - lr weight_decay, no more.
    scales: whether muP knows what its updates are at another width.
    high_lr: a learning rate above it is unusual, None if that depends on the model.
    correction, lookahead: what 2BW does about its delay unless told otherwise, and how far `predict` looks
    (docs/asynchronous.md has the measurements); lookahead_of_rest: with tensors that are left to AdamW, None for the
    same. nesterov: why its momentum cannot be taken as Nesterov did.
    """

    moments: Callable[[OptimizerConfig], tuple[str, ...]] = lambda settings: (_WIDE, _WIDE)
    whole: Callable[[str, int], bool] | None = None
    of_whole: Callable[[OptimizerConfig, Shape, Shape], int] = lambda settings, local, whole: math.prod(local)
    whole_moments: int = 1
    step: int = 0
    step_nesterov: int = 0
    of_step: Callable[[OptimizerConfig, Shape, Shape, float], float] = _newton_schulz
    of_tap: Callable[[OptimizerConfig, Shape], int] | None = None
    orthogonal: bool = False
    statistics: bool = False
    settings: tuple[str, ...] = ()
    only_decays: bool = True
    scales: bool = False
    high_lr: float | None = None
    correction: str = "predict"
    lookahead: float = 1.0
    lookahead_of_rest: float | None = None
    nesterov: str | None = None

    @property
    def taps(self) -> bool:
        """Whether it looks at what the gradients of linear layers are made of."""
        return self.of_tap is not None

    def most_moments(self, settings: OptimizerConfig) -> int:
        """How many moments most elements of a model have: those of the blocks' matrices. An average is one, too."""
        own = self.whole_moments if self.whole is not None else len(self.moments(settings))
        return own + (settings.ema_decay is not None)


OPTIMIZER_SPECS: Mapping[str, OptimizerSpec] = {
    "adam": OptimizerSpec(
        lambda settings: (settings.exp_avg_dtype, settings.exp_avg_sq_dtype),
        step_nesterov=3,
        scales=True,
        settings=("exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_impl"),
        high_lr=0.1,
        lookahead=2.0,
    ),
    "sgd": OptimizerSpec(
        lambda settings: (_WIDE,) if settings.args.sgd_momentum > 0 else (),
        step=2,
        step_nesterov=1,
        only_decays=False,
    ),
    "lion": OptimizerSpec(
        lambda settings: (settings.exp_avg_dtype,),
        step=2,
        scales=True,
        settings=("exp_avg_dtype",),
        nesterov="its update weighs the newest gradient by itself",
    ),
    "muon": OptimizerSpec(
        scales=True,
        whole=_blocks_matrix,
        orthogonal=True,
        lookahead_of_rest=2.0,
        nesterov="its momentum is Nesterov's already",
    ),
    "soap": OptimizerSpec(
        whole=_square_enough,
        of_whole=_moments_and_bases,
        whole_moments=2,
        of_step=_both_sides,
        lookahead_of_rest=2.0,
        nesterov="no such step is known in a basis that turns",
    ),
    "shampoo": OptimizerSpec(
        whole=_blocks_matrix,
        of_whole=_moments_and_roots,
        whole_moments=2,
        of_step=_roots,
        lookahead_of_rest=2.0,
        nesterov="no such step is known between two roots",
    ),
    "kfac": OptimizerSpec(
        whole=_square_enough,
        of_whole=lambda settings, local, whole: math.prod(local) + 2 * _factors(settings, whole),
        of_step=_inverses,
        of_tap=_factors,
        correction="none",
        nesterov="no such step is known between two inverses",
    ),
    "adafactor": OptimizerSpec(
        lambda settings: (), statistics=True, only_decays=False, correction="none", nesterov="it has no momentum"
    ),
}
"""Name -> OptimizerSpec. Muon, SOAP and Shampoo leave to AdamW, with wide moments, what is no matrix of a block."""
