"""Reads numbers from the device late, when their asynchronous copy has long arrived, so that the host does not wait."""

from typing import Any

import torch
from torch import Tensor


class LateReading:
    """Queues a copy of `numbers` to the host on the current stream. On a CPU they are read in place."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._arrived = numbers, None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            event: Any = torch.cuda.Event()
            event.record()
            self._arrived = event

    def read(self) -> Any:
        """The numbers, in lists as deep as there are dimensions. Waits for their copy, not for work that was queued
        after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.numpy().tolist()
