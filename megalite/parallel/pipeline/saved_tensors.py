"""What autograd saves of a forward, in memory that can be moved: to the host by EVICT, back by PREFETCH.

    F        every saved tensor becomes a piece of its micro-batch: the storage, and how to look at it
    EVICT    the pieces are copied to the host beside the next computation, then their memory on the device is let go
    PREFETCH the other way; a backward that comes first waits
    B        asks for tensors: views of the pieces' storages, which go as autograd lets go of them

On a GPU the copies run on a stream of their own, to and from page-locked memory. On a CPU both places are main memory
and a thread copies, so that everything can be tested: bytes on the "device" are counted, and a tensor that is asked for
while its piece is on the host raises.

Weights are not moved, nor is the stage's input, which waits for its gradient. A weight must not change before its
backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megalite.errors import RuntimeFailure


class _Weight(NamedTuple):
    """A saved parameter: stays where it is."""

    tensor: Tensor
    version: int


class _View(NamedTuple):
    """A saved tensor: how to look at its piece."""

    piece: _Piece
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Piece:
    """A storage, on the device or on the host. Counted in `memory` while it is on the device."""

    def __init__(self, memory: SavedTensors, storage: torch.UntypedStorage) -> None:
        self.memory = memory
        self.device = storage.device
        self.bytes = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        self.on_device = True
        self.moving: Any = None
        memory.count(self.bytes.numel())

    def __del__(self) -> None:
        if self.on_device:
            self.memory.count(-self.bytes.numel())

    def leave(self) -> None:
        """Starts the copy to the host; `left` ends it."""
        self.moving = self.memory.copy(self.bytes, to_host=True)

    def left(self) -> None:
        """The memory on the device is let go; raises what the copy raised."""
        self.bytes, self.moving, self.on_device = self.moving(), None, False
        self.memory.count(-self.bytes.numel())

    def come(self) -> None:
        """Starts the copy back."""
        self.moving, self.on_device = self.memory.copy(self.bytes, to_host=False), True
        self.memory.count(self.bytes.numel())

    def view(self, view: _View) -> Tensor:
        """The saved tensor, on its device."""
        if not self.on_device:
            raise RuntimeFailure("a backward asks for activations that are on the host: its program lacks a PREFETCH")
        if self.moving is not None:
            self.bytes, self.moving = self.moving(), None
        storage = self.bytes.untyped_storage()
        if storage.is_cuda:
            self.bytes.record_stream(torch.cuda.current_stream())
        return torch.empty(0, dtype=view.dtype, device=self.device).set_(storage, view.offset, view.shape, view.stride)


class SavedTensors:
    """The saved activations of a rank's stages.

    now, peak: bytes of them on the device, at this moment and at most.
    """

    def __init__(self, device: torch.device) -> None:
        self.now = self.peak = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: ThreadPoolExecutor | None = None
        self._of: dict[tuple[int, int], dict[int, weakref.ref[_Piece]]] = {}
        self._leaving: list[_Piece] = []

    def count(self, nbytes: int) -> None:
        """So many bytes more are on the device."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    @contextmanager
    def of(self, key: tuple[int, int], x: Tensor | None) -> Iterator[None]:
        """What is saved inside belongs to (stage, micro-batch) `key`. x: the stage's input."""
        pieces = self._of[key] = {}
        stays = 0 if x is None else x.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Any:
            base = tensor if tensor._base is None else tensor._base
            if isinstance(base, nn.Parameter):
                return _Weight(tensor, tensor._version)
            storage = tensor.untyped_storage()
            if storage.data_ptr() == stays or storage.nbytes() == 0:
                return _Weight(tensor.detach(), tensor._version)
            known = pieces.get(storage.data_ptr())
            piece = known() if known is not None else None
            if piece is None:
                piece = _Piece(self, storage)
                pieces[storage.data_ptr()] = weakref.ref(piece)
            return _View(piece, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

        with saved_tensors_hooks(pack, _unpack):
            yield

    def evict(self, key: tuple[int, int]) -> None:
        """Starts to move the activations of a (stage, micro-batch) to the host."""
        for reference in self._of[key].values():
            if (piece := reference()) is not None:
                piece.leave()
                self._leaving.append(piece)

    def settle(self) -> None:
        """A computation has ended: what left beside it is gone."""
        leaving, self._leaving = self._leaving, []
        for piece in leaving:
            piece.left()

    def prefetch(self, key: tuple[int, int]) -> None:
        """Starts to bring them back."""
        for reference in self._of[key].values():
            if (piece := reference()) is not None:
                piece.come()

    def drop(self, key: tuple[int, int]) -> None:
        """The backward has run."""
        del self._of[key]

    def copy(self, x: Tensor, *, to_host: bool) -> Callable[[], Tensor]:
        """Starts a copy; what it returns waits for it, on the device's current stream where there is one."""
        if self._stream is None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="activations")
            future: Future[Tensor] = self._thread.submit(self.host_copy, x)
            return future.result
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if to_host:
                copy = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
                x.record_stream(self._stream)
            else:
                copy = x.to(self._stream.device, non_blocking=True)
            done = self._stream.record_event()

        def wait() -> Tensor:
            torch.cuda.current_stream().wait_event(done)
            return copy

        return wait

    def host_copy(self, x: Tensor) -> Tensor:
        """What the thread of a CPU does. (`benchmarks/tiers.py` makes it slow.)"""
        return torch.empty_like(x).copy_(x)


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, _View):
        return saved.piece.view(saved)
    if saved.tensor._version != saved.version:
        raise RuntimeFailure("a weight has been modified by an inplace operation before its backward")
    weight: Tensor = saved.tensor
    return weight
