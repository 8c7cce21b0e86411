"""Is the checkpoint one of this model? All differences in one message, by flag.

Parallel and training flags may differ freely.
"""

from __future__ import annotations

from typing import Any

from megalite.config.architecture import differences
from megalite.config.model import ModelConfig
from megalite.errors import CheckpointError

__all__ = ["check_model"]


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


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
