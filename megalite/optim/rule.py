"""What an update rule is: parameter groups, state by tensor, `step`. `torch.optim.Optimizer` is one, too.

Ours do not derive from it: its constructor imports torch's compiler, 70 MB and most of a second on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor


class UpdateRule:
    """Groups with defaults filled in, and an empty state. Subclasses define `step`."""

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0, "weight_decay": 0.0, **defaults, **g} for g in groups]
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)

    def step(self) -> None:
        """Updates every tensor that has a `.grad`."""
        raise NotImplementedError
