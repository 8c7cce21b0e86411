"""Which devices the tests of this folder run on: a CPU too, where their subject exists there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
NUM_GPUS = torch.cuda.device_count()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
DEVICES: list[Any] = ["cpu", pytest.param("cuda", marks=needs_cuda)]


def needs_gpus(number: int) -> Any:
    """Skips where there are fewer: NCCL wants a device a rank."""
    return pytest.mark.skipif(number > NUM_GPUS, reason=f"needs {number} CUDA devices")
