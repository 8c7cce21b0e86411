"""How large the operands of a stage's products were in each micro-batch, for scales of float8 in updates to come.

`parallel.tensor.delayed_scaling` notes it, `train.scale_history` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

OPERANDS = ("x", "w", "dy")


class Magnitudes:
    """The largest magnitudes of each micro-batch's operands, until an update asks for them.

    Forwards and backwards that belong to a training step are enclosed by `of`; an evaluation notes nothing. What a
    recomputation notes again is the same.
    """

    def __init__(self) -> None:
        self._microbatch: int | None = None
        self._noted: dict[int, dict[tuple[int, str], Tensor]] = {}

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
        """Whether a micro-batch is being computed."""
        return self._microbatch is not None

    def note(self, layer: int, operand: str, magnitude: Tensor) -> None:
        """magnitude: one number, of this rank's part."""
        assert self._microbatch is not None
        self._noted.setdefault(self._microbatch, {})[layer, operand] = magnitude.view(1)

    def take(self, wanted: Callable[[int], bool], like: Tensor) -> Tensor:
        """The largest over the micro-batches that are wanted, which are forgotten: `[layers, 3]`, 0 where there is
        none. like: of this shape."""
        nothing = like.new_zeros(1)
        keys = [(layer, operand) for layer in range(len(like)) for operand in OPERANDS]
        taken = [self._noted.pop(number) for number in list(self._noted) if wanted(number)]
        rows = [torch.cat([noted.get(key, nothing) for key in keys]) for noted in taken]
        return torch.stack(rows).amax(0).view(like.shape) if rows else torch.zeros_like(like)
