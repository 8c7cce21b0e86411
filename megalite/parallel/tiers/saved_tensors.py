"""Tensors that autograd saves in a forward, in memory that can be moved to the host and back.

    F        every saved tensor becomes a piece of its forward: the storage, and how to look at it
    EVICT    the pieces are copied to the host beside the next computation, then their memory on the device is let go
    PREFETCH the other way; a backward that comes first waits
    B        asks for tensors: views of the pieces' storages, which go as autograd lets go of them

Two callers: a stage, whose program says when (`pipeline/offloaded_stage.py`), and `ActivationOffload`, layer by layer.
On a CPU the bytes on the "device" are counted, and a tensor that is asked for while it is on the host raises.

Weights are not moved. What autograd has saved must not change before its backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megalite.errors import RuntimeFailure
from megalite.parallel.tiers.mover import Arrival, Mover, TieredMemory


class _Kept(NamedTuple):
    """A saved tensor that stays where it is."""

    tensor: Tensor
    version: int


class _View(NamedTuple):
    """A saved tensor: how to look at its piece."""

    piece: _Piece
    number: int
    version: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Piece:
    """A storage, on the device or on the host. Counted while it is on the device."""

    def __init__(self, forward: SavedForward, tensor: Tensor) -> None:
        self.forward, self.count = forward, forward.memory.count
        self._saved: list[Tensor] = []
        self._versions: list[int] = []
        self.device = tensor.device
        self.bytes = torch.empty(0, dtype=torch.uint8, device=self.device).set_(tensor.untyped_storage())
        self.on_device = True
        self._coming: Arrival | None = None
        self._leaving: tuple[Tensor, Arrival] | None = None
        self.count(self.bytes.numel())

    def __del__(self) -> None:
        if self.on_device:
            self.count(-self.bytes.numel())

    def look(self, tensor: Tensor) -> _View:
        """A saved tensor in this storage."""
        self._saved.append(tensor.detach())  # shares its count of changes
        layout = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        return _View(self, len(self._saved) - 1, tensor._version, tensor.dtype, *layout)

    def leave(self, *, release: bool) -> None:
        """Starts the copy to the host; `left` ends it. release: the device's allocator ends it."""
        self._versions = [tensor._version for tensor in self._saved]
        self._saved.clear()
        self._leaving = self.forward.memory.mover.land(self.bytes, release=release)
        if release:
            self._gone()

    def left(self) -> None:
        """The memory on the device is let go; raises what the copy raised."""
        assert self._leaving is not None
        self._leaving[1].wait()
        self._gone()

    def _gone(self) -> None:
        assert self._leaving is not None
        self.bytes, self._coming = self._leaving
        self._leaving = None
        self.on_device = False
        self.count(-self.bytes.numel())

    def come(self) -> None:
        """Starts the copy back, behind that to the host."""
        self.bytes, self._coming = self.forward.memory.mover.bring(self.bytes, after=self._coming)
        self.on_device = True
        self.count(self.bytes.numel())

    def view(self, view: _View) -> Tensor:
        """The saved tensor, on its device."""
        self.forward.asked()
        if not self.on_device:
            raise RuntimeFailure("a backward asks for activations that are on the host: its program lacks a PREFETCH")
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        version = self._saved[view.number]._version if self._saved else self._versions[view.number]
        if view.version != version:
            raise RuntimeFailure("an activation has been modified by an inplace operation before its backward")
        storage = self.bytes.untyped_storage()
        return torch.empty(0, dtype=view.dtype, device=self.device).set_(storage, view.offset, view.shape, view.stride)


class SavedForward:
    """Tensors that one forward has saved.

    stays: address of the storage that is not moved.
    on_demand: it comes back when its first tensor is asked for, and that of the layer `before` starts to.
    """

    def __init__(
        self, memory: SavedTensors, stays: int = 0, *, on_demand: bool = False, before: SavedForward | None = None
    ) -> None:
        self.memory, self._stays, self._on_demand, self._before = memory, stays, on_demand, before
        self._pieces: dict[int, weakref.ref[_Piece]] = {}

    def pieces(self) -> list[_Piece]:
        """Pieces that autograd still holds."""
        found = (reference() for reference in self._pieces.values())
        return [piece for piece in found if piece is not None]

    def pack(self, tensor: Tensor) -> _Kept | _View:
        """Returns what autograd keeps in place of the tensor."""
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter):
            return _Kept(tensor, tensor._version)
        storage = tensor.untyped_storage()
        if storage.data_ptr() == self._stays or storage.nbytes() == 0:
            return _Kept(tensor.detach(), tensor._version)
        known = self._pieces.get(storage.data_ptr())
        piece = known() if known is not None else None
        if piece is None:
            piece = _Piece(self, tensor)
            self._pieces[storage.data_ptr()] = weakref.ref(piece)
        return piece.look(tensor)

    def evict(self, *, release: bool = False) -> None:
        """Starts to move it to the host, where `SavedTensors.settle` ends that. release: the memory on the device goes
        as soon as it has been copied."""
        for piece in self.pieces():
            piece.leave(release=release)
            if not release:
                self.memory.leaving.append(piece)

    def prefetch(self) -> None:
        """Starts to bring back what is on the host."""
        for piece in self.pieces():
            if not piece.on_device:
                piece.come()

    def asked(self) -> None:
        """A backward wants one of its tensors."""
        if self._on_demand:
            self._on_demand = False
            self.prefetch()
            if self._before is not None:
                self._before.prefetch()


class SavedTensors(TieredMemory):
    """The saved activations of a rank. leaving: pieces on their way to the host."""

    def __init__(self, mover: Mover) -> None:
        super().__init__(mover)
        self.leaving: list[_Piece] = []

    @contextmanager
    def of(self, x: Tensor | None) -> Iterator[SavedForward]:
        """Collects what is saved inside. x: the stage's input, which waits for its gradient and is not moved."""
        forward = SavedForward(self, 0 if x is None else x.untyped_storage().data_ptr())
        with saved_tensors_hooks(forward.pack, unpack):
            yield forward

    def settle(self) -> None:
        """A computation has ended: what left beside it is gone."""
        leaving, self.leaving = self.leaving, []
        for piece in leaving:
            piece.left()


def unpack(saved: _Kept | _View) -> Tensor:
    """Returns the tensor that `SavedForward.pack` was given. Raises RuntimeFailure."""
    if isinstance(saved, _View):
        return saved.piece.view(saved)
    if saved.tensor._version != saved.version:
        raise RuntimeFailure("a weight has been modified by an inplace operation before its backward")
    return saved.tensor


class ActivationOffload:
    """Moves the activations of the first `layers` of a stage (in forward order) to the host.

    forward    layer 0 | layer 1 | layer 2 ...       what a layer saves goes to the host behind the next one's forward
    to host              0         1
    backward   ... layer 2 | layer 1 | layer 0       the first tensor that a layer asks for brings back all of the layer
    to device          1         0                   before it, behind its own backward

    Do not also recompute them: what is recomputed is not saved.
    """

    def __init__(self, layers: Sequence[nn.Module], memory: SavedTensors) -> None:
        self._memory = memory
        self._last: SavedForward | None = None
        self._open: list[tuple[SavedForward, AbstractContextManager[None]]] = []
        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._enter, i == 0))
            layer.register_forward_hook(self._leave, always_call=True)

    def _enter(self, first: bool, layer: nn.Module, args: Any) -> None:
        """A layer's forward begins."""
        self._last = SavedForward(self._memory, on_demand=True, before=None if first else self._last)
        hooks = saved_tensors_hooks(self._last.pack, unpack)
        hooks.__enter__()
        self._open.append((self._last, hooks))

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        saved, hooks = self._open.pop()
        hooks.__exit__(None, None, None)
        saved.evict(release=True)
