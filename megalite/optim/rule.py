"""What an update rule is: parameter groups, state by tensor, `step`. `torch.optim.Optimizer` is one, too.

Ours do not derive from it: its constructor imports torch's compiler, 70 MB and most of a second on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
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

    def statistics(self) -> Iterator[Any]:
        """State that is not one number an element (`megalite.comm.Statistic`)."""
        yield from ()

    def foresees(self, group: dict[str, Any]) -> bool:
        """Whether the moments of the group's tensors tell what the next step will be."""
        return False

    def expected_step(
        self, p: Tensor, piece: slice, group: dict[str, Any], *, lr: float, weight_decay: float
    ) -> Tensor:
        """What a step adds to `p.view(-1)[piece]` if the next gradient is as its moments expect. Only where `foresees`
        says so, after a step at least."""
        raise NotImplementedError
