"""Arguments and results of a rank, sent between two processes of one test.

The standard library's `ForkingPickler` would pass tensors through shared memory that outlives a killed rank, so
tensors travel as plain bytes. For tests only: both ends are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch


@dataclass(frozen=True)
class _TensorBytes:
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes


def _pack(value: object) -> object:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().flatten()
        return _TensorBytes(value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes())
    return _inside(value, _pack)


def _unpack(value: object) -> object:
    if isinstance(value, _TensorBytes):
        flat = torch.frombuffer(bytearray(value.data), dtype=torch.uint8) if value.data else torch.empty(0).byte()
        return flat.view(value.dtype).reshape(value.shape)
    return _inside(value, _unpack)


def _inside(value: Any, change: Callable[[object], object]) -> object:
    """`value` with everything in a dict, list, tuple or named tuple changed."""
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        kind: Any = type(value)
        items = [change(item) for item in value]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    return value


def encode(value: object) -> bytes:
    """Bytes of plain Python values, dataclasses of plain values, and tensors inside lists, tuples and dicts."""
    return bytes(ForkingPickler.dumps(_pack(value)))


def decode(data: bytes) -> object:
    """Inverse of `encode`; tensors come back on the CPU."""
    return _unpack(ForkingPickler.loads(data))
