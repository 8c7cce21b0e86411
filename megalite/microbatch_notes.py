"""What the layers of a stage note of each micro-batch, until the run asks for it.

MicrobatchNotes    whose notes they are
ExpertLoads        what the routers did; `train.expert_report` and `engine.expert_bias` ask
Magnitudes         how large the operands of products were, for float8's scales; `engine.scale_history` asks
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key")

EXTRA = 3
"""Numbers of a layer behind the tokens of each expert: load-balancing loss, z-loss, dropped choices."""

OPERANDS = ("x", "w", "dy")


class MicrobatchNotes(Generic[Key]):
    """By micro-batch and key: a tensor. `of` encloses the computations that count; an evaluation notes nothing."""

    def __init__(self) -> None:
        self._microbatch: int | None = None
        self._noted: dict[int, dict[Key, Tensor]] = {}

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """What is noted inside belongs to this micro-batch."""
        self._microbatch = microbatch
        try:
            yield
        finally:
            self._microbatch = None

    @property
    def wanted(self) -> bool:
        """Whether a micro-batch is being counted."""
        return self._microbatch is not None

    def _keep(self, key: Key, value: Tensor) -> None:
        if self._microbatch is not None:
            self._noted.setdefault(self._microbatch, {})[key] = value


class ExpertLoads(MicrobatchNotes[int]):
    """By micro-batch and layer: `[E + 3]`, the choices of this rank's tokens for each expert, before any was dropped;
    this rank's part of the load-balancing loss and of the z-loss, without their coefficients; choices dropped.

    `of` encloses forwards, not recomputations.
    """

    def note(self, layer: int, load: Tensor) -> None:
        """Adds to the load of a layer, where a micro-batch is being counted."""
        noted = self._noted.get(self._microbatch, {}) if self._microbatch is not None else {}
        self._keep(layer, noted[layer] + load if layer in noted else load)

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


class Magnitudes(MicrobatchNotes[tuple[int, str]]):
    """By micro-batch, layer and operand: the largest magnitude, for scales of float8 in updates to come.

    `of` encloses forwards and backwards of a training step. What a recomputation notes again is the same.
    """

    def note(self, layer: int, operand: str, magnitude: Tensor) -> None:
        """magnitude: one number, of this rank's part."""
        self._keep((layer, operand), magnitude.view(1))

    def take(self, wanted: Callable[[int], bool], like: Tensor) -> Tensor:
        """The largest over the micro-batches that are wanted, which are forgotten: `[layers, 3]`, 0 where there is
        none. like: of this shape."""
        nothing = like.new_zeros(1)
        keys = [(layer, operand) for layer in range(len(like)) for operand in OPERANDS]
        taken = [self._noted.pop(number) for number in list(self._noted) if wanted(number)]
        rows = [torch.cat([noted.get(key, nothing) for key in keys]) for noted in taken]
        return torch.stack(rows).amax(0).view(like.shape) if rows else torch.zeros_like(like)
