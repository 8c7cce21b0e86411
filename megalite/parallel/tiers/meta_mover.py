"""The mover of a rank that is built on `meta`: what would be on its host or in its file is without values, too."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.parallel.tiers.mover import Arrival, Mover, Pairs
from megalite.parallel.tiers.state_file import StateFile


class MetaMover(Mover):
    """Moves nothing, and knows which memory is the host's.

    on_cpu: whether it stands for the mover of a CPU rank.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        super().__init__(torch.device("meta"))
        self.apart = not on_cpu
        self._on_host: dict[int, torch.UntypedStorage] = {}

    def on_host(self, x: Tensor) -> bool:
        """Whether `empty` made the memory of x."""
        return x.untyped_storage()._cdata in self._on_host

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty(torch.Size(shape), dtype=dtype, device=self.device)
        self._on_host[made.untyped_storage()._cdata] = made.untyped_storage()
        return made

    def file_in(self, folder: str) -> StateFile:
        return _NoFile()

    def copy(self, pairs: Pairs, **how: Any) -> Arrival:
        return Arrival()


class _NoFile(StateFile):
    """In the place of a file: nothing is written, and no disk is asked."""

    def __init__(self) -> None:
        self.close = weakref.finalize(self, int)  # called, or not: there is nothing to close

    def empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty(torch.Size(shape), dtype=dtype, device="meta")

    def take_in(self, x: Tensor) -> None:
        pass

    def region_of(self, x: Tensor) -> None:
        return None
