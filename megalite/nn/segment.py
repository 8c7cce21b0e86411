"""A segment of a block: what is computed between two messages of the tensor or expert axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from megalite.parallel.tensor import Message

MakeMessage = Callable[[], Message]
"""Makes the message of a layer: one that is waited for at once, or one that travels behind other work."""


class Segment(NamedTuple):
    """run: takes what the segment before it returned.

    owners: modules with parameters that it uses through autograd. (Linear layers and experts add up their gradients
    themselves.)
    """

    run: Callable[..., Any]
    owners: tuple[nn.Module, ...] = ()

    def beside(self) -> Segment:
        """The segment as it is in a block: the residual stream passes it by."""
        return Segment(lambda x, y: (x, self.run(y)), self.owners)


def present(*modules: nn.Module | None) -> tuple[nn.Module, ...]:
    """Those that there are."""
    return tuple(module for module in modules if module is not None)
