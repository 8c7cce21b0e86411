"""Is the checkpoint one of this model, and is its optimizer state one for this run? By flag, all in one message.

Parallel and training flags may differ freely.
"""

from __future__ import annotations

from typing import Any

from megalite.config import Config
from megalite.config.architecture import differences
from megalite.config.model import ModelConfig
from megalite.errors import CheckpointError

__all__ = ["check_model", "check_state"]

# Flags of the optimizer that decide which tensors its state has, and in which dtype they are kept.
_STATE = ("optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")


def check_model(saved: ModelConfig, now: ModelConfig, where: str) -> None:
    """Raises CheckpointError naming every flag in which the checkpoint's model is another one.

    where: how the message begins, e.g. `--load=runs/a`.
    """
    differing = [
        f"--{name.replace('_', '-')}={_text(ours)} (checkpoint {_text(theirs)})"
        for name, (ours, theirs) in differences(saved, now).items()
    ]
    if differing:
        raise CheckpointError(
            f"{where}: model differs from checkpoint: {', '.join(differing)}; use the checkpoint's values, or "
            "--use-checkpoint-args"
        )


def check_state(saved: Config, now: Config, where: str) -> None:
    """Raises CheckpointError where the optimizer state of `saved` means nothing to a run of `now`."""
    pairs = [(name, getattr(saved.optimizer, name), getattr(now.optimizer, name)) for name in _STATE]
    pairs.append(("fp64", saved.training.precision.fp64, now.training.precision.fp64))
    differing = [
        f"--{name.replace('_', '-')}={_text(ours)} (checkpoint {_text(theirs)})"
        for name, theirs, ours in pairs
        if theirs != ours
    ]
    if differing:
        raise CheckpointError(
            f"{where}: its optimizer state is another one: {', '.join(differing)}; use the checkpoint's values, or "
            "begin with a fresh state by --no-load-optim"
        )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
