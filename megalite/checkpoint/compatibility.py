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
    differing = []
    if saved.optimizer.optimizer != now.optimizer.optimizer:
        differing.append(f"--optimizer={now.optimizer.optimizer} (checkpoint {saved.optimizer.optimizer})")
    if saved.training.fp64 != now.training.fp64:
        differing.append(f"--fp64={_text(now.training.fp64)} (checkpoint {_text(saved.training.fp64)})")
    if differing:
        raise CheckpointError(
            f"{where}: its optimizer state is another one: {', '.join(differing)}; use the checkpoint's values, or "
            "begin with a fresh state by --no-load-optim"
        )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
