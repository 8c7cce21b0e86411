"""A stage whose forward keeps its input alone; the action R runs the forward again ahead of the backward.

    F    layers, for the output alone       input, micro-batch and version are kept
    R    the same layers once more          autograd's graph; the input goes into it
    B    as in every other stage

Both runs record a graph, so that both take the same kernels and give the same bits; the first one's saved tensors are
dropped as they come. Dropout is keyed, so the masks are the same too.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalite.microbatch import StageInput
from megalite.parallel.pipeline.stage import Stage


class RecomputedStage(Stage):
    """A `Stage` of `Program.recomputed`; takes the same arguments."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._inputs: dict[int, tuple[Tensor | None, StageInput, Tensor, int]] = {}

    def forward(self, number: int, x: Tensor | None, microbatch: StageInput, factor: Tensor, *, version: int) -> Tensor:
        """As `Stage.forward`, without what a backward needs."""
        with saved_tensors_hooks(_drop, _missing):
            out = super().forward(number, x, microbatch, factor, version=version)
        del self._in_flight[number]
        self._inputs[number] = x, microbatch, factor, version
        return out

    def recompute(self, number: int) -> None:
        """The forward again, from here on as if it had just run."""
        x, microbatch, factor, version = self._inputs.pop(number)
        super().forward(number, x, microbatch, factor, version=version)

    @property
    def num_in_flight(self) -> int:
        return super().num_in_flight + len(self._inputs)


def _drop(tensor: Tensor) -> None:
    """What autograd saves of the first run."""


def _missing(saved: None) -> NoReturn:
    raise RuntimeError("a stage that recomputes has no backward before its R")
