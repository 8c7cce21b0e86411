"""The layout once more in the number format of the configuration (bf16, fp16, fp32), against the plainest layout in it.

What may be apart is what rounding makes: `megalite.testing.rounding` states the model. In fp32 the first losses and
norms, of the same weights, agree within 1e-6, sums of any length. After updates, and in 16 bits, they agree within
FACTOR times what the plain layout shows if its sums are permuted, which is measured here where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from megalite.comm import World
from megalite.config import Config, parse
from megalite.testing.rounding import DRAWS, FACTOR, FP32, PermutedSums
from megalite.train import open_run

Trained = tuple[Sequence[float], Sequence[float | None]]
"""Losses, norms; no norm of an update that was skipped."""
CLOSE = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-5}
"""How far losses may be apart where permuted sums do not tell: a few units of the last digit of 8, 11 and 24. Norms:
three times as far."""


def losses(world: World, config_file: str, steps: int, seed: int | None = None) -> Trained:
    """Losses and norms of a plain run. seed: of permuted sums; None: as they are."""
    if seed is not None:
        with PermutedSums(seed):
            return losses(world, config_file, steps)
    found, norms = [], []
    with open_run(parse(["--config", config_file], world_size=world.size), world) as run:
        for step in range(steps):
            stats = run.trainer.train_step(drain=step + 1 == steps)
            found.append(float("nan") if stats.lm_loss is None else float(stats.lm_loss))
            norms.append(None if stats.grad_norm is None else float(stats.grad_norm))
    return found, norms


@dataclass(frozen=True)
class Allowed:
    """How far apart losses and norms may be, relative. first: at the first step. later: at the others; asked for where
    `first` is not enough."""

    first: float
    later: Callable[[], tuple[float, float]]

    @classmethod
    def close(cls, close: float) -> Allowed:
        """Losses within a number, norms within three times as much."""
        return cls(close, lambda: (close, 3 * close))

    @classmethod
    def of(cls, own: Config, plain: Trained, permuted: Callable[[int], Trained]) -> Allowed:
        """What the format of `own` allows. permuted: the plain run with the permuted sums of a seed."""
        name = own.training.precision.name
        if own.parallel.grad_reduce_in_bf16:  # one rank reduces nothing
            return cls.close(CLOSE["bf16"])
        if own.training.float8.fp8_format is not None:  # a rounding takes an operand to another float8, a sixteenth off
            return cls.close(CLOSE[name])

        @cache
        def later() -> tuple[float, float]:
            drawn = [permuted(seed) for seed in range(DRAWS)]
            of_losses, of_norms = (max(furthest(run[i], plain[i]) for run in drawn) for i in (0, 1))
            return max(FP32, FACTOR * of_losses), max(FP32, FACTOR * of_norms)

        return cls(FP32 if name == "fp32" else 0.0, later)


def furthest(found: Sequence[float | None], expected: Sequence[float | None]) -> float:
    """The largest relative distance of numbers that both have."""
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None]
    return max((abs(a - b) / abs(b) for a, b in pairs), default=0.0)


def apart(name: str, found: Trained, expected: Trained, against: str, allowed: Allowed) -> str:
    """Losses and norms of two runs compared: a line."""
    worst = 0.0
    for index, what in enumerate(("loss", "gradient norm")):
        for step, (x, y) in enumerate(zip(found[index], expected[index], strict=True), 1):
            if x is None or y is None:
                if x is not y:
                    return f"FAIL  in {name}: iteration {step} was skipped by one of layout and {against}"
                continue
            error, bound = abs(x - y) / abs(y), allowed.first
            if not error <= bound and (step > 1 or not bound):
                bound = allowed.later()[index]
            worst = max(worst, error)
            if not error <= bound:
                return (
                    f"FAIL  in {name}: iteration {step}, {what}: {x:.9g} instead of {y:.9g} ({against}): {error:.1e} "
                    f"apart, rounding allows {bound:.1e}"
                )
    what = "losses and norms" if any(norm is not None for norm in expected[1]) else "losses"
    return f"  in {name}, against {against}: {what} within {worst:.1e}"
