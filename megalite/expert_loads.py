"""What the routers of a stage did with each micro-batch, until the run asks for it.

A forward notes it, a recomputation and an evaluation do not: `of` encloses the forwards that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

EXTRA = 3
"""Numbers of a layer behind the tokens of each expert: load-balancing loss, z-loss, dropped choices."""


class ExpertLoads:
    """By micro-batch and layer: `[E + 3]`, the choices of this rank's tokens for each expert, before any was dropped;
    this rank's part of the load-balancing loss and of the z-loss, without their coefficients; choices dropped."""

    def __init__(self) -> None:
        self._microbatch: int | None = None
        self._noted: dict[int, dict[int, Tensor]] = {}

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """What is noted inside belongs to this micro-batch."""
        self._microbatch = microbatch
        try:
            yield
        finally:
            self._microbatch = None

    def note(self, layer: int, load: Tensor) -> None:
        """Keeps the load of a layer, where a micro-batch is being counted."""
        if self._microbatch is not None:
            self._noted.setdefault(self._microbatch, {})[layer] = load

    def sums(self, wanted: Callable[[int], bool]) -> dict[int, Tensor]:
        """Layer -> the sum over those micro-batches that are wanted."""
        total: dict[int, Tensor] = {}
        for number, loads in self._noted.items():
            for layer, load in loads.items() if wanted(number) else ():
                total[layer] = total[layer] + load if layer in total else load
        return total

    def take(self, microbatches: range) -> dict[int, Tensor]:
        """Layer -> the sum over these micro-batches, which are forgotten."""
        total = self.sums(lambda number: number in microbatches)
        for number in microbatches:
            self._noted.pop(number, None)
        return total
