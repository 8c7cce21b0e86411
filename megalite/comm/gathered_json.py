"""Small values of every rank, as JSON: what ranks have found, decided or measured."""

import json
from typing import Any

import torch

from megalite.comm.axis import Axis
from megalite.comm.collectives import all_gather_into, all_reduce_, device_of

# Texts up to this long travel in one collective; longer ones take two.
_HEAD_BYTES = 1024


class GatheredJson:
    """The JSON values of all ranks, in flight as soon as this is made; collective.

    They are sent as text, so nothing that arrives is ever executed.
    """

    def __init__(self, value: Any, axis: Axis) -> None:
        self._axis, self._value = axis, value
        if axis.size > 1:
            self._raw = json.dumps(value).encode()
            head = self._raw[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0")
            self._heads = _GatheredBytes(len(self._raw).to_bytes(8, "little") + head, axis)

    def wait(self) -> list[Any]:
        """The values in the order of the axis. All ranks call this once, before their next collective over the axis."""
        if self._axis.size == 1:
            return [self._value]
        heads = self._heads.wait()
        lengths = [int.from_bytes(head[:8], "little") for head in heads]
        tails = [b""] * len(heads)
        longest = max(lengths)
        if longest > _HEAD_BYTES:
            tails = _GatheredBytes(self._raw[_HEAD_BYTES:].ljust(longest - _HEAD_BYTES, b"\0"), self._axis).wait()
        texts = [head[8:] + tail for head, tail in zip(heads, tails, strict=True)]
        return [json.loads(text[:length]) for text, length in zip(texts, lengths, strict=True)]


class _GatheredBytes:
    """The bytes of all ranks, the same number from each."""

    def __init__(self, data: bytes, axis: Axis) -> None:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device_of(axis))
        self._rows = torch.empty(axis.size, len(data), dtype=torch.uint8, device=mine.device)
        self._handle = all_gather_into(self._rows, mine[None], axis, async_op=True)

    def wait(self) -> list[bytes]:
        self._handle.wait()
        return [row.tobytes() for row in self._rows.cpu().numpy()]


def all_gather_json(value: Any, axis: Axis) -> list[Any]:
    """The JSON values of all ranks, in the order of the axis."""
    return GatheredJson(value, axis).wait()


def bytes_of(rank: int, data: bytes, axis: Axis) -> bytes:
    """What one rank of the axis has as `data`, on all ranks. Collective; its memory does not grow with the axis."""
    length = all_gather_json(len(data), axis)[rank]
    if axis.size == 1 or not length:
        return data if axis.size == 1 else b""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if axis.rank == rank else torch.zeros(length).byte()
    shared = mine.to(device_of(axis))
    all_reduce_(shared, axis)
    return shared.cpu().numpy().tobytes()
