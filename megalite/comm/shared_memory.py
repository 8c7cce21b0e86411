"""Collectives between CPU ranks of one host through shared memory: a message is written once and read in place.

Tensor parallelism waits for four sums a block, and gloo's sockets copy each of them several times. Here every rank
owns a ring of slots in a mapped file. To send is to copy into one's next slot and to publish a counter; to receive is
to read the others' slots in the order of ranks, so that a sum has the same rounding on every rank and in every run,
whichever comes first.

    counters   [ rank 0: posted, consumed | rank 1: posted, consumed | ... ]     a cache line each, written by its owner
    slots      [ slot 0 of rank 0, 1, ... | slot 1 of rank 0, 1, ... | ... ]     message n lies in slot n mod DEPTH

A message is published as it is posted, so what the caller computes before `wait` hides the others' lateness. A slot
is written again only when every rank has consumed it; a rank that must wait for that first finishes what it has posted
itself, so no order of waits can lock.

Counters are plain aligned 64-bit words, which x86 makes visible in the order they were written; on other processors,
across hosts and on GPUs `share_axis` changes nothing and torch.distributed carries the messages.
"""

import contextlib
import dataclasses
import math
import mmap
import os
import platform
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm.axis import Axis
from megalite.comm.exchange import Exchange
from megalite.comm.gathered_json import all_gather_json
from megalite.errors import PeerLost, rank_name
from megalite.host_memory import machine_id
from megalite.scratch import remove_forgotten

DEPTH = 8
SLOT_BYTES = 1 << 20
LINE_BYTES = 128
SPINS = 200
NAP_SECONDS = 50e-6

Finish = Callable[[Sequence[Tensor]], None]


class SharedExchange:
    """One rank's end of the shared memory of an axis. Ranks must call the same operations in the same order."""

    def __init__(self, memory: mmap.mmap, *, names: Sequence[str], rank: int, timeout: float) -> None:
        self._size, self._names, self._rank, self._timeout = len(names), names, rank, timeout
        size = len(names)
        self._counters = memoryview(memory)[: size * LINE_BYTES].cast("q")
        flat = torch.frombuffer(memory, dtype=torch.uint8, offset=size * LINE_BYTES)
        self._slots = flat.view(DEPTH, size, SLOT_BYTES)
        self._posted = 0
        self._pending: deque[tuple[int, int, torch.dtype, Finish]] = deque()

    def all_reduce_(self, x: Tensor, op: str) -> Exchange:
        """Starts x = sum, max or min over the ranks, in place."""
        whole = x if x.is_contiguous() else x.contiguous()
        flat = whole.view(-1)
        step = SLOT_BYTES // flat.element_size()
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step]
            self._post(part, partial(_reduce, out=part, op=op))
        message = self._last_posted()
        if whole is not x:
            message.wait()
            x.copy_(whole)
        return message

    def all_gather_into(self, out: Tensor, x: Tensor) -> Exchange:
        """Starts out = the ranks' x one after the other along dim 0."""
        flat, rows = x.contiguous().view(-1), out.view(self._size, -1)
        step = SLOT_BYTES // flat.element_size()
        for begin in range(0, flat.numel(), step):
            targets = rows[:, begin : begin + step]
            self._post(flat[begin : begin + step], partial(_gather, targets=targets))
        return self._last_posted()

    def reduce_scatter_into(self, out: Tensor, x: Tensor) -> Exchange:
        """Starts out = this rank's part along dim 0 of the sum of x."""
        rows = x.contiguous().view(self._size, -1)
        flat = out.view(-1)
        step = max(1, SLOT_BYTES // (flat.element_size() * self._size))
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step]
            self._post(rows[:, begin : begin + step], partial(_reduce, out=part, op="sum", row=self._rank))
        return self._last_posted()

    def all_to_all_rows(self, out: Tensor, x: Tensor, traffic: Sequence[Sequence[int]]) -> Exchange:
        """Starts out = the rows of x `[n, ...]` that are for this rank, rank after rank. traffic[i][j]: how many go
        from i to j."""
        me, size = self._rank, self._size
        sent, arriving = x.contiguous().split(list(traffic[me])), out.split([row[me] for row in traffic])
        arriving[me].copy_(sent[me])
        width = math.prod(x.shape[1:])
        step = SLOT_BYTES // x.element_size()
        for distance in range(1, size):  # every rank to one other, as many messages as the longest of them takes
            leaving = sent[(me + distance) % size].view(-1)
            source = (me - distance) % size
            into = arriving[source].view(-1)
            longest = width * max(traffic[rank][(rank + distance) % size] for rank in range(size))
            for begin in range(0, longest, step):
                part = into[begin : begin + step]
                self._post(leaving[begin : begin + step], partial(_take, rank=source, out=part), part.numel())
        return self._last_posted()

    def _last_posted(self) -> Exchange:
        """The handle of the last of a tensor's pieces, which finishes everything up to it."""
        return Exchange([], [], partial(self.finish, self._posted))

    def _post(self, values: Tensor, finish: Finish, arriving: int | None = None) -> None:
        """arriving: elements of the others' parts, where they are not as many as `values` has."""
        number = self._posted + 1
        self.finish(number - DEPTH)
        self._await(1, number - DEPTH)
        slot = self._slots[number % DEPTH, self._rank, : values.numel() * values.element_size()]
        slot.view(values.dtype).view(values.shape).copy_(values)
        self._posted = number
        expected = slot.numel() if arriving is None else arriving * values.element_size()
        self._pending.append((number, expected, values.dtype, finish))
        self._counters[self._rank * LINE_BYTES // 8] = number

    def finish(self, number: int) -> None:
        """Receives every message up to `number`, in order."""
        while self._pending and self._pending[0][0] <= number:
            current, nbytes, dtype, finish = self._pending.popleft()
            self._await(0, current)
            finish([self._slots[current % DEPTH, rank, :nbytes].view(dtype) for rank in range(self._size)])
            self._counters[self._rank * LINE_BYTES // 8 + 1] = current

    def _await(self, column: int, number: int) -> None:
        """Returns when every rank's counter has reached `number`."""
        for rank in range(self._size):
            place = rank * LINE_BYTES // 8 + column
            spins, deadline = 0, 0.0
            while self._counters[place] < number:
                spins += 1
                if spins < SPINS:
                    continue
                os.sched_yield()
                if spins % SPINS == 0:
                    now = time.monotonic()
                    deadline = deadline or now + self._timeout
                    if now > deadline:
                        raise PeerLost(f"{self._names[rank]} has not answered for {self._timeout:.0f} s")
                    time.sleep(NAP_SECONDS)


def _reduce(parts: Sequence[Tensor], out: Tensor, op: str, row: int | None = None) -> None:
    """out = op of the parts, or of this row of each, in the order of ranks."""
    parts = parts if row is None else [part.view(len(parts), -1)[row] for part in parts]
    table: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    combine = table[op]
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)


def _gather(parts: Sequence[Tensor], targets: Tensor) -> None:
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part)


def _take(parts: Sequence[Tensor], rank: int, out: Tensor) -> None:
    out.copy_(parts[rank])


def share_axis(axis: Axis, *, timeout: float = 600.0) -> Axis:
    """Gives an axis shared memory for CPU tensors, where all its ranks can see it; else returns it as it is.

    Collective over the axis. timeout: seconds after which a rank that does not answer is an error (`PeerLost`).
    """
    if axis.size == 1 or "gloo" not in dist.get_backend(axis.group):
        return axis
    own = {"host": f"{platform.node()} {machine_id()}", "machine": platform.machine()}
    everyone = all_gather_json(own, axis)
    if any(other != own for other in everyone) or own["machine"].lower() not in ("x86_64", "amd64"):
        return axis
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
    total = axis.size * (LINE_BYTES + DEPTH * SLOT_BYTES)
    path = all_gather_json(_create(folder, total) if axis.is_first else None, axis)[0]
    memory: mmap.mmap | None = None
    if path is not None:
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), total)
    able = all(all_gather_json(memory is not None, axis))
    if axis.is_first and path is not None:
        os.unlink(path)  # mapped by all: the memory lives as long as they do, and nothing is left behind
    if not able or memory is None:
        return axis
    names = [rank_name(rank, platform.node(), f"{axis.name} coordinate {i}") for i, rank in enumerate(axis.ranks)]
    exchange = SharedExchange(memory, names=names, rank=axis.rank, timeout=timeout)
    return dataclasses.replace(axis, shared=exchange)


def _create(folder: str, total: int) -> str | None:
    """A file of `total` bytes that really exist (a full /dev/shm would kill the process at the first write)."""
    remove_forgotten(Path(folder))
    try:
        descriptor, path = tempfile.mkstemp(prefix=f"megalite-{os.getpid()}-", dir=folder)
        try:
            os.posix_fallocate(descriptor, 0, total)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return path
