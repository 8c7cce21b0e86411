"""The link between a device and its host: copies that run beside the computation, and bytes that are on the device.

On a GPU copies run on a stream of their own, to and from page-locked memory. On a CPU both places are main memory and a
thread copies, so that everything can be tested: what has been let go has no memory, and the bytes on the "device" are
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megalite.comm import Axis, Handle, all_reduce_, reduce_scatter_into
from megalite.page_locked import host_bytes

PIECE = 16 << 20
"""Elements of a tensor on the host that ranks exchange at a time, through the device."""

Wait = Callable[[], None]
"""Returns when a copy may be read, and its source overwritten: for the device's current stream where there is one."""


class HostLink:
    """Of one rank. Weights and gradients each have a line of their own, in which copies follow one another.

    now, peak: bytes of weights and gradients that are on the device for a while, now and at most.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.now = self.peak = 0
        self._streams = [torch.cuda.Stream(device) for _ in "wg"] if device.type == "cuda" else []
        self._sums: list[Future[None]] = []

    @cached_property
    def _threads(self) -> list[ThreadPoolExecutor]:
        return [ThreadPoolExecutor(1, "host-link") for _ in "wg"]

    @cached_property
    def _adder(self) -> ThreadPoolExecutor:
        """Adds on the host what has arrived there, in order."""
        return ThreadPoolExecutor(1, "host-sums")

    def count(self, nbytes: int) -> None:
        """So many bytes more are on the device."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros in the host's memory, page-locked where the device will read it."""
        return host_bytes(numel * dtype.itemsize, pinned=bool(self._streams)).view(dtype)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], *, gradients: bool = False) -> Wait:
        """Starts target = source for each (target, source), one of them on the device."""
        if not self._streams:
            future = self._threads[gradients].submit(self.move, pairs)
            return lambda: future.result()
        with self._behind(gradients) as stream:
            self.move(pairs)
            done = stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)

    def copy_then(self, pairs: Sequence[tuple[Tensor, Tensor]], start: Callable[[], Handle]) -> Handle:
        """The same, then what sends the targets to other ranks."""
        if not self._streams:
            self.copy(pairs)()
            return start()
        with self._behind(gradients=False):
            self.move(pairs)
            return start()

    @contextmanager
    def _behind(self, gradients: bool) -> Iterator[torch.cuda.Stream]:
        """On the stream of that line, behind what the device has been given so far."""
        stream = self._streams[gradients]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield stream

    def move(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copies, on the thread or the stream that is meant for it."""
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    def add(self, total: Tensor, arrived: Tensor, *, fresh: bool) -> Wait:
        """Starts total += arrived, a tensor of the device, on the host; `settle` waits for all. fresh: total = arrived.
        The result waits until `arrived` may be overwritten."""
        if not self._streams:
            future = self._adder.submit(self._sum, total, arrived, fresh, None)
            self._sums.append(future)
            return lambda: future.result()
        landed = torch.empty(arrived.shape, dtype=arrived.dtype, pin_memory=True)
        with self._behind(gradients=True) as stream:
            self.move([(landed, arrived)])
            done = stream.record_event()
        self._sums.append(self._adder.submit(self._sum, total, landed, fresh, done))
        return lambda: torch.cuda.current_stream().wait_event(done)

    def _sum(self, total: Tensor, arrived: Tensor, fresh: bool, done: Any) -> None:
        with torch.cuda.device(self.device) if done is not None else nullcontext():
            if done is not None:
                done.synchronize()
            total.copy_(arrived) if fresh else total.add_(arrived)

    def settle(self) -> None:
        """Returns when the host may read what was sent to it. Raises what a sum has raised."""
        sums, self._sums = self._sums, []
        for future in sums:
            future.result()
        for stream in self._streams:
            stream.synchronize()


def sum_anywhere(x: Tensor, axis: Axis, device: torch.device) -> None:
    """x = its sum over the ranks of `device`s."""
    if x.device == device or axis.size == 1:
        all_reduce_(x, axis)
    else:
        for part in x.split(PIECE):
            there = part.to(device)
            all_reduce_(there, axis)
            part.copy_(there)


def sum_on_host(full: Tensor, axis: Axis, device: torch.device, *, scatter: bool) -> None:
    """full, on the host = its sum over the ranks; of this rank's slice alone where `scatter`."""
    if not scatter:
        sum_anywhere(full, axis, device)
        return
    rows = full.view(axis.size, -1)
    for begin in range(0, rows.shape[1], PIECE // axis.size) if axis.size > 1 else ():
        part = rows[:, begin : begin + PIECE // axis.size]
        own = torch.empty(part.shape[1], dtype=part.dtype, device=device)
        reduce_scatter_into(own, part.to(device).reshape(-1), axis)
        part[axis.rank] = own
