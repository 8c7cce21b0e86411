"""Activations of the first layers wait for their backward in host memory.

    forward    layer 0 | layer 1 | layer 2 ...       what autograd saves inside an offloaded layer is copied to the
    to host              0         1                 host, behind the next layer's forward
    backward   ... layer 2 | layer 1 | layer 0       the first tensor that a layer asks for brings back all of the layer
    to device          1         0                   before it, behind its own backward

Nothing in a layer knows of it: the layers' hooks put autograd's own saved-tensor hooks around their forward. Weights
are never copied. On a CPU the copies are made all the same, so that the path can be tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


class _Weight(NamedTuple):
    """A parameter that autograd saved: stays where it is, and must not change before its backward."""

    tensor: Tensor
    version: int


class _Layer:
    """What one forward of one layer saved."""

    def __init__(self, before: _Layer | None, stream: Any) -> None:
        self.before = before
        self.stream = stream
        self.host: list[Tensor] = []
        self.devices: list[torch.device] = []
        self.uses: list[int] = []
        self.numbers: dict[Any, tuple[int, Any]] = {}
        self.returned: dict[int, Tensor] = {}
        self.arrived: Any = None
        self.asked = False

    def save(self, tensor: Tensor) -> int:
        """Copies to the host, once however often it is saved; the number to ask for it by."""
        storage = tensor.untyped_storage()
        key = (
            storage.data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor._version,
        )
        number, memory = self.numbers.get(key, (-1, None))
        if memory is None or memory.expired():  # other memory may have come to the same place
            number = self._copy(tensor)
            self.numbers[key] = (number, StorageWeakRef(storage))
        self.uses[number] += 1
        return number

    def _copy(self, tensor: Tensor) -> int:
        if self.stream is None:
            self.host.append(tensor.clone())
        else:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                copy.copy_(tensor, non_blocking=True)
            tensor.record_stream(self.stream)
            self.host.append(copy)
        self.devices.append(tensor.device)
        self.uses.append(0)
        return len(self.host) - 1

    def fetch(self) -> None:
        """Starts to copy everything back."""
        if self.stream is None:
            return
        with torch.cuda.stream(self.stream):
            for i, (copy, device) in enumerate(zip(self.host, self.devices, strict=True)):
                self.returned[i] = copy.to(device, non_blocking=True)
            self.arrived = self.stream.record_event()

    def load(self, number: int) -> Tensor:
        """The tensor, on its device."""
        if not self.asked:
            self.asked = True
            if not self.returned:
                self.fetch()
            if self.before is not None:
                self.before.fetch()
        if self.stream is None:
            return self.host[number]
        torch.cuda.current_stream().wait_event(self.arrived)  # not for the copies of the layer before, which follow
        self.uses[number] -= 1
        tensor = self.returned[number] if self.uses[number] else self.returned.pop(number, None)
        if tensor is None:  # asked for again, by a second backward
            tensor = self.host[number].to(self.devices[number])
        tensor.record_stream(torch.cuda.current_stream())
        return tensor


class ActivationOffload:
    """Hooks `layers` (in forward order); do not also recompute them: what is recomputed is not saved."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        cuda = bool(layers) and any(p.is_cuda for p in layers[0].parameters())
        self._stream = torch.cuda.Stream() if cuda else None
        self._last: _Layer | None = None
        self._open: list[Any] = []
        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._enter, i == 0))
            layer.register_forward_hook(self._leave, always_call=True)

    def _enter(self, first: bool, layer: nn.Module, args: Any) -> None:
        """A layer's forward begins."""
        saved_here = self._last = _Layer(None if first else self._last, self._stream)

        def pack(tensor: Tensor) -> Any:
            base = tensor if tensor._base is None else tensor._base
            if isinstance(base, nn.Parameter):
                return _Weight(tensor, tensor._version)
            return saved_here.save(tensor)

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, _Weight):
                if saved.tensor._version != saved.version:
                    raise RuntimeError("a weight has been modified by an inplace operation before its backward")
                return saved.tensor
            return saved_here.load(saved)

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        self._open.append(hooks)

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._open.pop().__exit__(None, None, None)
