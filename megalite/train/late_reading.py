"""Numbers of a device that the host reads when they have long arrived, so that it never waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LateReading:
    """Copies `numbers` (1-dim) to the host behind what the current stream has been given. On a CPU they are there."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._arrived = numbers, None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            event: Any = torch.cuda.Event()
            event.record()
            self._arrived = event

    def read(self) -> list[float]:
        """The numbers; waits for their copy, not for what the device has been given since."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[float] = self._host.numpy().tolist()
        return found
