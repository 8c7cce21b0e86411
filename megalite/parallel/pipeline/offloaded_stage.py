"""A stage whose saved activations may wait on the host (EVICT, PREFETCH)."""

from typing import Any

from torch import Tensor

from megalite.microbatch import StageInput
from megalite.parallel.pipeline.stage import Stage
from megalite.parallel.tiers import SavedForward, SavedTensors


class OffloadedStage(Stage):
    """A `Stage` of a program with `Program.room`. saved: of all stages of the rank; the rest as `Stage`."""

    def __init__(self, *args: Any, saved: SavedTensors, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.saved = saved
        self._forwards: dict[int, SavedForward] = {}

    def forward(self, number: int, x: Tensor | None, microbatch: StageInput, factor: Tensor, *, version: int) -> Tensor:
        with self.saved.of(x) as self._forwards[number]:
            out = super().forward(number, x, microbatch, factor, version=version)
        self.saved.settle()
        return out

    def backward(self, number: int, dy: Tensor | None) -> Tensor | None:
        dx = super().backward(number, dy)
        del self._forwards[number]
        self.saved.settle()
        return dx

    def backward_weight(self, number: int) -> None:
        super().backward_weight(number)
        self.saved.settle()

    def evict(self, number: int) -> None:
        self._forwards[number].evict()

    def prefetch(self, number: int) -> None:
        self._forwards[number].prefetch()
