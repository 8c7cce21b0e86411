"""Arguments and results of a rank, sent between two processes of one test.

The standard library's `ForkingPickler` would pass tensors through shared memory that outlives a killed rank, so
tensors travel as plain bytes. For tests only: both ends are ours.
"""

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch


class _Pickler(ForkingPickler):
    def reducer_override(self, value: object) -> Any:
        """Tensors by their bytes, everything else as ever."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().flatten()
        return _tensor, (value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes())


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    return flat.view(dtype).reshape(shape)


def encode(value: object) -> bytes:
    """Bytes of what can be pickled; tensors may be anywhere inside of it."""
    return bytes(_Pickler.dumps(value))


def decode(data: bytes) -> object:
    """Inverse of `encode`; tensors come back on the CPU."""
    decoded: object = ForkingPickler.loads(data)
    return decoded
