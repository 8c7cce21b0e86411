"""Channels between pipeline ranks.

A channel carries tensors whose shapes both ends know, so no shape is ever sent. Messages from one rank to another
arrive in the order in which they were sent, and the schedule validator proves that both ends agree on that order. So
neither tags nor matching are needed: NCCL has none, gloo gets a running number.

One communicator carries the messages to higher ranks and another those to lower ranks, so that activations and
gradients that cross cannot block each other.

With `headers=True` a small message goes ahead of each tensor and says what follows (kind, stage, micro-batch, shape). A
rank that receives something other than its schedule says raises RuntimeFailure with rank, stage and micro-batch.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm.axis import Axis, WaitClock
from megalite.comm.collectives import device_of
from megalite.errors import PeerLost, RuntimeFailure

_HEADER_LENGTH = 8
#: Messages whose memory is held because they may not have been sent yet.
_MOST_IN_FLIGHT = 16


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a tensor that crosses between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class MessageLabel:
    """Label of a message: `kind` 'F' or 'B', the stage that will use it, the global micro-batch id."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} for stage {self.stage}, micro-batch {self.microbatch}"


def _encode(label: MessageLabel, shape: tuple[int, ...], device: torch.device) -> Tensor:
    words = [ord(label.kind), label.stage, label.microbatch, len(shape), *shape]
    return torch.tensor(words + [0] * (_HEADER_LENGTH - len(words)), dtype=torch.int64, device=device)


def _check(header: Tensor, label: MessageLabel, shape: tuple[int, ...], *, rank: int, peer: int) -> None:
    kind, stage, microbatch, dims, *extents = header.tolist()
    found = MessageLabel(chr(kind), stage, microbatch)
    found_shape = tuple(extents[:dims])
    if (found, found_shape) != (label, shape):
        raise RuntimeFailure(
            f"pipeline rank {rank}: expected {label} of shape {list(shape)} from rank {peer}, "
            f"got {found} of shape {list(found_shape)}: the two ranks follow different schedules"
        )


def connect(axis: Axis, pairs: Iterable[tuple[int, int]]) -> None:
    """Exchanges one small message between the two ranks (lower, higher) of every pair. Collective over the axis.

    A library may connect two ranks at the first message between them, and both then wait for each other: a rank that
    posts a receive early would block before it has sent what its peer needs to get that far. NCCL makes a communicator
    per pair and direction, each with device memory of its own, so pairs that send nothing are not connected.
    """
    token = torch.zeros(1, device=device_of(axis))
    for low, high in sorted(pairs):
        if axis.rank in (low, high):
            peer = axis.ranks[low + high - axis.rank]
            first, second = (dist.send, dist.recv) if axis.rank == low else (dist.recv, dist.send)
            first(token, peer, group=axis.group)
            second(token, peer, group=axis.group)


@dataclass
class IncomingMessage:
    """A receive that has been posted. buffer: where it arrives; target: the copy on another device that needs it."""

    buffer: Tensor
    target: Tensor | None
    work: Any
    header: Tensor | None
    header_work: Any
    label: MessageLabel
    rank: int
    peer: int
    waits: WaitClock

    def wait(self) -> Tensor:
        try:
            with self.waits:
                if self.header is not None:
                    self.header_work.wait()
                    _check(self.header, self.label, tuple(self.buffer.shape), rank=self.rank, peer=self.peer)
                self.work.wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PeerLost(
                f"pipeline rank {self.rank}: waiting for {self.label} from pipeline rank {self.peer} failed: {reason}"
            ) from error
        return self.buffer if self.target is None else self.target.copy_(self.buffer, non_blocking=True)


class Incoming(Protocol):
    """A receive that has been posted."""

    def wait(self) -> Tensor:
        """The tensor, once it has arrived."""
        ...


class Channel:
    """Point-to-point messages. Made by all ranks of the pipeline at the same time.

    down, up: axes that carry messages to higher and to lower pipeline ranks.
    pairs: the ranks (lower, higher) that send to each other (`StagePlacement.neighbours`).
    headers: each message is announced by a small one and checked.
    """

    def __init__(self, down: Axis, up: Axis, pairs: Collection[tuple[int, int]], *, headers: bool = False) -> None:
        for line in (down, up):
            connect(line, pairs)
        self._down, self._up, self._headers = down, up, headers
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._received: defaultdict[int, int] = defaultdict(int)
        self._in_flight: deque[tuple[Any, Tensor]] = deque()
        # gloo reads and writes host memory: tensors of a device are copied (ranks that share one GPU).
        self._host_only = down.size > 1 and device_of(down).type == "cpu"

    def _line(self, source: int, target: int) -> Axis:
        return self._down if target > source else self._up

    def send(self, x: Tensor, *, peer: int, label: MessageLabel) -> None:
        """Starts sending; the tensor must not change until it has been sent."""
        if self._headers:
            self._isend(_encode(label, tuple(x.shape), x.device), peer)
        self._isend(x.contiguous(), peer)
        # gloo reports a send as complete only after it has been waited for; without that, every activation that was
        # ever sent would stay in memory. Programs are proved to be free of deadlock even if each send waits. NCCL frees
        # the memory in stream order; waiting would delay the stream by an old message.
        while self._in_flight and not self._host_only and self._in_flight[0][0].is_completed():
            self._in_flight.popleft()
        while len(self._in_flight) > _MOST_IN_FLIGHT:
            self._in_flight.popleft()[0].wait()

    def _isend(self, x: Tensor, peer: int) -> None:
        line = self._line(self._down.rank, peer)
        x = x.cpu() if self._host_only and x.is_cuda else x
        self._sent[peer] += 1
        work = dist.isend(x, line.ranks[peer], group=line.group, tag=self._sent[peer])
        self._in_flight.append((work, x))

    def post_recv(self, spec: TensorSpec, *, peer: int, label: MessageLabel, into: Tensor | None = None) -> Incoming:
        """Begins to receive a tensor. into: where it belongs, if that is there."""
        device = torch.device("cpu") if self._host_only else spec.device
        header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=device) if self._headers else None
        header_work = self._irecv(header, peer) if header is not None else None
        copied = device != spec.device
        target = (spec.empty() if into is None else into) if copied else None
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=device) if copied or into is None else into
        work = self._irecv(buffer, peer)
        line = self._line(peer, self._down.rank)
        return IncomingMessage(buffer, target, work, header, header_work, label, self._down.rank, peer, line.waits)

    def _irecv(self, buffer: Tensor, peer: int) -> Any:
        line = self._line(peer, self._down.rank)
        self._received[peer] += 1
        return dist.irecv(buffer, line.ranks[peer], group=line.group, tag=self._received[peer])

    def flush(self) -> None:
        """Returns when everything has been sent."""
        with self._down.waits:
            while self._in_flight:
                self._in_flight.popleft()[0].wait()
