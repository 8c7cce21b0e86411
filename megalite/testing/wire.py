"""Arguments and results of a rank on their way between two processes of one test.

The standard library's `ForkingPickler` would pass tensors through shared memory that outlives a killed rank, so
tensors travel as plain bytes. For tests only: both ends are ours.
"""

from __future__ import annotations

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
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return _same_kind(value, [_pack(item) for item in value])
    return value


def _unpack(value: object) -> object:
    if isinstance(value, _TensorBytes):
        flat = torch.frombuffer(bytearray(value.data), dtype=torch.uint8) if value.data else torch.empty(0).byte()
        return flat.view(value.dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: _unpack(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return _same_kind(value, [_unpack(item) for item in value])
    return value


def _same_kind(value: Any, items: list[object]) -> object:
    """A list, tuple or named tuple like `value` that holds `items`."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def encode(value: object) -> bytes:
    """Bytes of plain Python values, dataclasses of plain values, and tensors inside lists, tuples and dicts."""
    return bytes(ForkingPickler.dumps(_pack(value)))


def decode(data: bytes) -> object:
    """Inverse of `encode`; tensors come back on the CPU."""
    return _unpack(ForkingPickler.loads(data))
