"""Stand-ins for torch.distributed's calls: they count as NCCL's, and gloo carries them, or nobody does.

    async_op=False               the current stream: whoever runs on another one has to wait for this one
    async_op=True                the communicator's stream, behind the current one; `wait` orders the stream that is
                                 current then, and until then the tensors are held
    isend, irecv                 a communicator and a stream for each pair of ranks; in a batch the communicator's own

gloo works on copies, which `wait` delivers: what a planted race does to the memory meanwhile is no matter. Where nobody
carries them (a rehearsal of one rank), what arrives is what this rank itself holds (`values.py`).
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.rehearsal.fake_groups import FakeGroups
from megalite.rehearsal.order import Access, Region, where
from megalite.rehearsal.record import RECV, SEND, Call, Communicator, Communicators
from megalite.rehearsal.streams import Gpu, Stream
from megalite.rehearsal.values import deliver

APART = {"all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather",
         "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
         "all_to_all_single": "all_to_all"}  # fmt: skip
"""Collectives whose arguments are (output, input) -> their kind; those of the others are one tensor. Names differ by
version."""
BOUND = {"_all_gather_single": "all_gather_into_tensor", "_reduce_scatter_single": "reduce_scatter_tensor"}
"""What `megalite.comm.collectives` has taken of them."""
MESSAGES = {"isend": SEND, "send": SEND, "irecv": RECV, "recv": RECV}


class Work:
    """In place of NCCL's handles. carried: gloo's, for copies of the tensors; they go to the first that are held."""

    def __init__(
        self, gpu: Gpu, stream: Stream, call: Call, carried: Any, held: Sequence[Tensor], copies: Sequence[Tensor]
    ) -> None:
        self.call = call
        self._stream = stream
        self._gpu, self._carried, self._held, self._copies = gpu, carried, held, copies
        self._event = stream.record_event()
        gpu.unwaited[id(self)] = self

    def wait(self, *_: Any) -> bool:
        if self._gpu.unwaited.pop(id(self), None) is not None and self._carried is not None:
            with self._gpu.state(quiet=True):
                self._carried.wait()
                for target, came in zip(self._held, self._copies, strict=False):
                    if target.untyped_storage().nbytes():
                        target.detach().copy_(came)
        self._held = ()
        self._gpu.current.wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        """Where nobody carries it, a message is taken to be over when somebody asks: the host is no further ahead of
        its device than that. The memory may go, then; the host has not waited."""
        if self._carried is not None:
            return False
        self._gpu.unwaited.pop(id(self), None)
        for x in self._held:
            self._gpu.ledger.of(x).recorded.add(self._stream.line.number)
        self._held = ()
        return True


class _Messages:
    """fake: the groups of a rank that is alone; None: real ones, whose backend carries what is sent."""

    def __init__(self, gpu: Gpu, fake: FakeGroups | None) -> None:
        self._gpu, self._fake = gpu, fake
        self._streams: dict[Any, Stream] = {}
        self._known = Communicators()

    def _stream(self, key: Any, name: str) -> Stream:
        """The stream of a communicator, behind the current one."""
        if key not in self._streams:
            self._streams[key] = Stream(self._gpu, name)
        self._streams[key].wait_stream(self._gpu.current)
        return self._streams[key]

    def _of(self, group: Any, async_op: bool) -> tuple[Communicator, Stream]:
        members = self._communicator(group)
        key = members if group is None else id(group)
        return members, self._stream(key, f"nccl's stream of {members}") if async_op else self._gpu.current

    def _communicator(self, group: Any) -> Communicator:
        if isinstance(group, Communicator):
            return group
        if self._fake is not None:
            return self._fake.world
        return self._known.of(dist.get_process_group_ranks(group or dist.group.WORLD), 0)

    def _begin(
        self, call: Call, stream: Stream, reads: Sequence[Tensor], writes: Sequence[Tensor],
        carry: Callable[[], tuple[Any, Sequence[Tensor]]],
    ) -> Work:  # fmt: skip
        """carry: gives (gloo's handle, copies that arrive in what is written)."""
        carried: Any = None
        copies: Sequence[Tensor] = ()
        if self._fake is None:
            with self._gpu.state(quiet=True):
                self._gpu.kernels.provide(reads, self._gpu.current.line.clock)
                carried, copies = carry()
        self._gpu.ledger.work(stream.line, call.kind, reads, writes)
        self._gpu.calls.begin(call, stream.line)
        if carried is not None:
            carried, copies = self._gpu.kernels.arrival(stream.line, carried, copies, reads, writes)
        if self._fake is not None:
            for x in writes:
                deliver(self._gpu, call, x, reads[0] if reads else None, self._fake)
        return Work(self._gpu, stream, call, carried, [*writes, *reads], copies[: len(writes)])

    def collective(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        kind = APART.get(name, name)

        def call(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
            tensors = [x for x in args if isinstance(x, Tensor)]
            if self._gpu.quiet or not any(self._gpu.on_device(x) for x in tensors):
                if self._fake is not None:
                    raise RuntimeError(f"{kind}: NCCL carries tensors of the device only; this one is on the host")
                return real(*args, group=group, async_op=async_op, **kwargs)
            more, (members, stream) = args[len(tensors) :], self._of(group, async_op)

            def carry() -> tuple[Any, Sequence[Tensor]]:
                later = async_op or self._gpu.kernels.puts_off
                copies = [x.detach().clone() if later else x for x in tensors]
                return real(*copies, *more, group=group, async_op=later, **kwargs), copies

            noted = self._noted(kind, members, stream, tensors, more, kwargs)
            work = self._begin(noted, stream, tensors[1:] if name in APART else tensors, tensors[:1], carry)
            return work if async_op else work.wait() and None

        return call

    def _noted(
        self, kind: str, members: Communicator, stream: Stream, tensors: Sequence[Tensor], more: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Call:  # fmt: skip
        part = tensors[0] if kind in ("all_reduce", "broadcast", "reduce_scatter") else tensors[-1]
        sizes = list(more) or [kwargs.get("output_split_sizes"), kwargs.get("input_split_sizes")]
        received, sent = (tuple(rows or ()) for rows in (*sizes, None, None)[:2])
        if kind != "all_to_all":
            received = sent = ()
        elif sent or received:
            part = part[:1]
        op = str(kwargs.get("op", "")).rpartition(".")[2].lower()
        place = where()
        return Call(kind, members, part.nbytes, _name(part), place, stream.line, op=op, sent=sent, received=received)

    def parts(self, kind: str) -> Callable[..., Any]:
        """`all_gather` and `reduce_scatter` of unequal parts, which gloo has not: carried as one sum."""
        gathers = kind == "all_gather"

        def call(first: Any, second: Any, group: Any = None, async_op: bool = False) -> Any:
            parts, own = (list(first), second) if gathers else (list(second), first)
            members, stream = self._of(group, async_op)

            def carry() -> tuple[Any, Sequence[Tensor]]:
                rank, sizes = dist.get_rank(group), [len(part) for part in parts]
                whole = torch.cat([part.detach() for part in parts])
                if gathers:
                    whole.zero_().split(sizes)[rank].copy_(own.detach())
                carried, arriving = dist.all_reduce(whole, group=group, async_op=True), whole.split(sizes)
                return carried, arriving if gathers else [arriving[rank]]

            nbytes = sum(part.nbytes for part in parts)
            noted = Call(f"{kind} of parts", members, nbytes, _name(own), where(), stream.line)
            reads, writes = ([own], parts) if gathers else (parts, [own])
            work = self._begin(noted, stream, reads, writes, carry)
            return work if async_op else work.wait() and None

        return call

    def message(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, peer: int, group: Any = None, tag: int = 0) -> Any:
            work = self._send(name, real, x, peer, group, tag)
            return work.wait() if name in ("send", "recv") else work

        call.real, call.kind = (real, name)  # type: ignore[attr-defined]  # which `P2POp` asks for
        return call

    def _send(
        self, name: str, real: Callable[..., Any], x: Tensor, peer: int, group: Any, tag: int, *, batch: bool = False
    ) -> Any:
        if self._gpu.quiet or not self._gpu.on_device(x):
            return real(x, peer, group=group, tag=tag)
        kind, key = MESSAGES[name], id(group) if batch else (id(group), peer)
        stream = self._stream(key, f"nccl's stream of messages with rank {peer}")

        def carry() -> tuple[Any, Sequence[Tensor]]:
            copy = x.detach().clone()
            return real(copy, peer, group=group, tag=tag), [copy]

        noted = Call(kind, self._communicator(group), x.nbytes, _name(x), where(), stream.line, peer=peer)
        return self._begin(noted, stream, [x] if kind == SEND else [], [x] if kind == RECV else [], carry)

    def batch(self, operations: Sequence[Any]) -> list[Any]:
        begun = [*enumerate(operations)]
        if self._gpu.kernels.puts_off:  # in no order: a receive may begin to write before a send reads
            begun.sort(key=lambda pair: MESSAGES[pair[1].op.kind] != RECV)
        made = {number: self._send(op.op.kind, op.op.real, *op[1:], batch=True) for number, op in begun}
        works = [made[number] for number in range(len(operations))]
        accesses, place = [], where()
        for work, op in zip(works, operations, strict=True):
            if isinstance(work, Work):
                kind, region = work.call.kind, Region.of(op.tensor)
                accesses.append((op.tensor, Access(work._stream.line, 0, kind == RECV, region, kind, place)))
        self._gpu.ledger.together(accesses)
        first = self._gpu.calls[-len(works)].after
        for call in self._gpu.calls[-len(works) :]:  # none of a batch waits for another of it
            call.after = first
        return works


class _Operation(NamedTuple):
    """In place of `dist.P2POp`, which looks at its function's identity."""

    op: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: Any = None
    tag: int = 0


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


@contextmanager
def messages(gpu: Gpu, fake: FakeGroups | None = None) -> Iterator[None]:
    """While it is open, torch.distributed's calls with tensors of the device are recorded; those of fake groups are all
    that there is."""
    collectives = importlib.import_module("megalite.comm.collectives")
    made = _Messages(gpu, fake)
    names: dict[str, Any] = {"get_backend": lambda group=None: "nccl", "P2POp": _Operation}
    names["batch_isend_irecv"] = made.batch
    for name in ("all_reduce", "broadcast", *(name for name in APART if hasattr(dist, name))):
        names[name] = made.collective(name, getattr(dist, name))
    names |= {name: made.parts(name) for name in ("all_gather", "reduce_scatter")}
    for name in MESSAGES:
        names[name] = made.message(name, getattr(dist, f"i{name.removeprefix('i')}"))
    bound = {name: made.collective(as_, getattr(collectives, name)) for name, as_ in BOUND.items()}
    with ExitStack() as stack:
        for owner, stands in ((dist, names), (collectives, bound), (dist, {} if fake is None else fake.names())):
            for name, value in stands.items():
                stack.enter_context(patch.object(owner, name, value))
        yield
