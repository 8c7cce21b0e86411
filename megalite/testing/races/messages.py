"""Stand-ins for torch.distributed's calls: gloo carries the messages, and they count as NCCL's.

    async_op=False               the current stream: whoever runs on another one has to wait for this one
    async_op=True                the communicator's stream, behind the current one; `wait` orders the stream that is
                                 current then, and until then the tensors are held
    isend, irecv                 a stream for each pair of ranks; in a batch the communicator's

gloo works on copies, which `wait` delivers: what a planted race does to the memory meanwhile is no matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm import collectives
from megalite.testing.races.streams import Gpu, Stream

APART = {"all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single",
         "all_to_all_single"}  # fmt: skip
"""Collectives whose arguments are (output, input); those of the others are one tensor. Names differ by version."""
BOUND = ("_all_gather_single", "_reduce_scatter_single")
"""What `megalite.comm.collectives` has taken of them."""


class Work:
    """In place of NCCL's handles. carried: gloo's, for copies of the tensors, of which the first `delivers` arrive."""

    def __init__(
        self, gpu: Gpu, stream: Stream, carried: Any, held: Sequence[Tensor], copies: Sequence[Tensor], delivers: int
    ) -> None:
        self._gpu, self._carried, self._held, self._copies = gpu, carried, held, copies[:delivers]
        self._event = stream.record_event()
        gpu.unwaited[id(self)] = self

    def wait(self, *_: Any) -> bool:
        if self._gpu.unwaited.pop(id(self), None) is not None:
            with self._gpu.state(quiet=True):
                self._carried.wait()
                for target, came in zip(self._held, self._copies, strict=False):
                    if target.untyped_storage().nbytes():
                        target.detach().copy_(came)
        self._held = ()
        self._gpu.current.wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return False


class _Messages:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._streams: dict[Any, Stream] = {}

    def _stream(self, key: Any, name: str) -> Stream:
        """The stream of a communicator, behind the current one."""
        if key not in self._streams:
            self._streams[key] = Stream(self._gpu, name)
        self._streams[key].wait_stream(self._gpu.current)
        return self._streams[key]

    def collective(self, real: Callable[..., Any]) -> Callable[..., Any]:
        name = real.__name__

        def call(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
            tensors = [x for x in args if isinstance(x, Tensor)]
            if self._gpu.quiet or not any(self._gpu.on_device(x) for x in tensors):
                return real(*args, group=group, async_op=async_op, **kwargs)
            writes, reads = tensors[:1], tensors[1:] if name in APART else tensors
            stream = self._gpu.current
            if async_op:
                stream = self._stream(id(group), f"nccl's stream of {getattr(group, 'group_name', 'the world')}")
            with self._gpu.state(quiet=True):
                copies = [x.detach().clone() if async_op else x for x in tensors]
                carried = real(*copies, *args[len(tensors) :], group=group, async_op=async_op, **kwargs)
            self._gpu.ledger.work(stream.line, name, reads, writes)
            return Work(self._gpu, stream, carried, tensors, copies, 1) if async_op else None

        return call

    def parts(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """`all_gather` and `reduce_scatter` of unequal parts, which gloo has not: carried as one sum."""
        name, gathers = real.__name__, real.__name__ == "all_gather"

        def call(first: Any, second: Any, group: Any = None, async_op: bool = False) -> Any:
            parts, own = (list(first), second) if gathers else (list(second), first)
            stream = self._gpu.current
            if async_op:
                stream = self._stream(id(group), f"nccl's stream of {getattr(group, 'group_name', 'the world')}")
            with self._gpu.state(quiet=True):
                rank, sizes = dist.get_rank(group), [len(part) for part in parts]
                whole = torch.cat([part.detach() for part in parts])
                if gathers:
                    whole.zero_().split(sizes)[rank].copy_(own.detach())
                carried = dist.all_reduce(whole, group=group, async_op=True)
            reads, writes = ([own], parts) if gathers else (parts, [own])
            self._gpu.ledger.work(stream.line, name, reads, writes)
            arriving = list(whole.split(sizes)) if gathers else [whole.split(sizes)[rank]]
            work = Work(self._gpu, stream, carried, [*writes, *reads], arriving, len(arriving))
            return work if async_op else work.wait() and None

        return call

    def message(self, real: Callable[..., Any], *, waits: bool = False) -> Callable[..., Any]:
        name = real.__name__

        def call(x: Tensor, peer: int, group: Any = None, tag: int = 0) -> Any:
            return self._send(real, name, x, peer, group, tag, waits=waits)

        return call

    def _send(
        self, real: Callable[..., Any], name: str, x: Tensor, peer: int, group: Any, tag: int, *,
        waits: bool = False, batch: bool = False,
    ) -> Any:  # fmt: skip
        if self._gpu.quiet or not self._gpu.on_device(x):
            return real(x, peer, group=group, tag=tag)
        key: Any = id(group) if batch else (id(group), peer, name)
        stream = self._stream(key, f"nccl's stream of {name} with rank {peer}")
        with self._gpu.state(quiet=True):
            copy = x.detach().clone()
            carried = real(copy, peer, group=group, tag=tag)
        receives = name.endswith("recv")
        self._gpu.ledger.work(stream.line, name, [] if receives else [x], [x] if receives else [])
        work = Work(self._gpu, stream, carried, [x], [copy], int(receives))
        return work.wait() if waits else work

    def batch(self, operations: Sequence[Any]) -> list[Any]:
        return [
            self._send(op.op, op.op.__name__, op.tensor, op.peer, op.group, op.tag, batch=True) for op in operations
        ]


class _Operation:
    """In place of `dist.P2POp`, which looks at its function's identity."""

    def __init__(self, op: Callable[..., Any], tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> None:
        self.op = getattr(op, "real", op)
        self.tensor, self.peer, self.group, self.tag = tensor, peer, group, tag


@contextmanager
def messages(gpu: Gpu) -> Iterator[None]:
    """While it is open, torch.distributed's calls with tensors of the device are recorded."""
    made = _Messages(gpu)
    names: dict[str, Any] = {"get_backend": lambda group=None: "nccl", "P2POp": _Operation}
    names["batch_isend_irecv"] = made.batch
    for name in ("all_reduce", "broadcast", *(name for name in APART if hasattr(dist, name))):
        names[name] = made.collective(getattr(dist, name))
    names |= {name: made.parts(getattr(dist, name)) for name in ("all_gather", "reduce_scatter")}
    for name, real in {"isend": dist.isend, "irecv": dist.irecv, "send": dist.isend, "recv": dist.irecv}.items():
        names[name] = made.message(real, waits=name != real.__name__)
        names[name].real = real
    bound = {name: made.collective(getattr(collectives, name)) for name in BOUND}
    with ExitStack() as stack:
        for owner, stands in ((dist, names), (collectives, bound)):
            for name, value in stands.items():
                stack.enter_context(patch.object(owner, name, value))
        yield
