"""Work of streams on real values, as late as what waits for it allows: the second witness of a race.

    late=False      the compute stream works at once, what the others are given waits until somebody waits for it
    late=True       the compute stream is behind all others

From when a piece of work could begin until it is done its target is NaN. Of pieces that nothing orders the latest goes
first. Collectives are carried with what the device holds when they are launched, and arrive as late as anything else.
Memory that goes while work on it waits (no `record_stream`) is NaN as soon as its pool has given it to somebody else.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megalite.rehearsal.order import Clock, Line, Memory, is_dense, tensors_in
from megalite.rehearsal.streams import Gpu
from megalite.rehearsal.values import MISSING, written_first
from megalite.rehearsal.watch import ALLOCATE, Computed, waits_for_values

COMPUTE, OTHERS = "compute", "others"
"""Which streams work as late as they may."""
COPIES = ("copy_", "_to_copy")


class Held:
    """A tensor that a piece of work needs later. keeps: whether its memory stays for that long."""

    def __init__(self, gpu: Gpu, x: Tensor, *, keeps: bool, read: bool) -> None:
        self._gpu, self.memory = gpu, gpu.ledger.of(x)
        storage = x.untyped_storage()
        self.form = x.dtype, x.storage_offset(), x.shape, x.stride()
        self.storage = storage if keeps else None
        self._there, self._gone, self._safe = weakref.ref(storage, self._goes), 0, False
        self._values = x.detach().clone() if read and not keeps else None

    def _goes(self, _: Any) -> None:
        self._gone = self._gone or len(self._gpu.ledger.log)

    def changes(self) -> None:
        """Its memory was written, or has become another."""
        x = None if self._values is None else self.find()
        self._values = None if x is None else x.clone()

    def keep(self) -> None:
        """From now on nobody else gets it."""
        self.storage = self._there()
        self._safe = self._safe or not self._again()

    def _again(self) -> bool:
        """Whether its pool may have given its memory to somebody else."""
        line, since = self.memory.line, self._gpu.ledger.log[self._gone :] if self._gone else ()
        return line is not None and any(event[0] == "alloc" and event[3] == line.number for event in since)

    def find(self) -> Tensor | None:
        """It; None where its memory has gone."""
        storage = self.storage if self.storage is not None else self._there()
        dtype, offset, shape, strides = self.form
        if storage is None or (not storage.nbytes() and 0 not in shape):
            return None
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)

    def read(self) -> Tensor:
        """Its values; of memory that has gone the former ones, until somebody else may have it."""
        if (x := self.find()) is not None:
            return x
        if self._values is None or not self._gone or (self._again() and not self._safe):
            return torch.full(self.form[2], _nothing(self.form[0]), dtype=self.form[0])
        return self._values


@dataclass(eq=False)
class Piece:
    """A piece of work that waits. into: what is NaN once it has begun; saved: what was there. heirs: what the pool may
    have made since of memory that it writes."""

    number: int
    line: Line
    clock: Clock
    run: Callable[[Sequence[Tensor]], None]
    held: Sequence[Held]
    into: Sequence[Held]
    written: Sequence[Held]
    saved: list[Tensor] = field(default_factory=list)
    heirs: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)
    begun: bool = False

    @property
    def time(self) -> int:
        return self.clock[self.line.number]


class Late(Computed):
    """Kernels on real values. wrong: what went wrong where no value tells."""

    puts_off = True

    def __init__(self, gpu: Gpu, *, late: bool) -> None:
        self._gpu, self._compute_is_late = gpu, late
        self._pieces: dict[int, deque[Piece]] = {}
        self._numbers = count()
        self.wrong: list[str] = []

    def is_late(self, line: Line) -> bool:
        return (line is self._gpu.compute.line) == self._compute_is_late

    # ---- kernels -----------------------------------------------------------------------------------------------------

    def __call__(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], *, there: bool) -> Any:
        self._gpu.local.job = None
        line = self._gpu.current.line
        if there and name not in ALLOCATE:
            seeded = torch.Tag.nondeterministic_seeded in function.tags
            # `repeat_interleave` cannot run, not even for a shape, before its values are there.
            waits = name == "repeat_interleave" or waits_for_values(name, args, kwargs)
            if self.is_late(line) and not seeded and not waits:
                out = written_first(function, args, kwargs) if function._schema.is_mutable else None
                if out is not MISSING:
                    self._gpu.local.job = self._held(function, name, args, kwargs)
                    return out if function._schema.is_mutable else self._computed(function, name, args, kwargs)
            self.settle(line.clock)
        return self._computed(function, name, args, kwargs)

    def _computed(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return super().__call__(function, name, args, kwargs, there=True)

    def _held(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments as they are needed later: numbers of the host, and what it packs, are read at once."""
        line, written = self._gpu.current.line, function._schema.is_mutable
        ends = [x for x in args[:2] if isinstance(x, Tensor)] if name in COPIES else []
        plain = all(is_dense(x) and x.dtype == ends[0].dtype and x.stride() == ends[0].stride() for x in ends)

        def hold(x: Tensor) -> Any:
            memory = self._gpu.ledger.of(x)
            if not memory.on_device and not (written and name in COPIES and x is args[0]):
                if not (memory.pinned and plain and name in COPIES):
                    return x.detach().clone()
            stays = memory.line is line or line.number in memory.recorded or not memory.on_device
            keeps = (stays or self._compute_is_late) and not memory.registered
            return Held(self._gpu, x, keeps=keeps, read=True)

        with self._gpu.state(quiet=True, true_device=True), torch.no_grad():
            found: tuple[Any, Any] = torch.utils._pytree.tree_map_only(Tensor, hold, (tuple(args), dict(kwargs)))
            return found

    def follow(
        self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Tensor],
        outs: Sequence[Tensor], written: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Puts off what was not done at once."""
        job, line = self._gpu.local.job, self._gpu.current.line
        if not self.is_late(line) or (job is None and any(self._gpu.on_device(x) for x in given)):
            self.changes(map(self._gpu.ledger.of, written))
            return
        with self._gpu.state(quiet=True, true_device=True), torch.no_grad():
            values: list[Tensor] | None = None
            if job is None:  # made of nothing, or of what is on the host, which packs it at once where it is not locked
                if not (given and self._gpu.ledger.of(given[0]).pinned):
                    values = [x.detach().clone() for x in outs]
                job = tuple(args), dict(kwargs)
            leaves = [x for x in torch.utils._pytree.tree_leaves(job) if isinstance(x, (Held, Tensor))]
            into = [
                h for h, x in zip(leaves, given, strict=True) if isinstance(h, Held) and any(x is w for w in written)
            ]
            targets = [] if written else [Held(self._gpu, x, keeps=True, read=False) for x in outs]
            for x in () if written else outs:
                x.data.fill_(_nothing(x.dtype))

        def run(saved: Sequence[Tensor]) -> None:
            for target, before in zip(into, saved, strict=False):
                if (x := target.find()) is None:
                    self.wrong.append(f"{name} on {line.name} writes memory that has gone")
                    return
                x.copy_(before)
            thawed = torch.utils._pytree.tree_map_only(Held, Held.read, job)
            made = tensors_in(self._computed(function, name, *thawed)) if values is None else values
            for target, value in zip(targets, made, strict=False):
                if (x := target.find()) is not None:
                    x.copy_(value)

        self.put_off(line, run, [*targets, *(x for x in leaves if isinstance(x, Held))], into, [*targets, *into])

    # ---- when --------------------------------------------------------------------------------------------------------

    def put_off(
        self, line: Line, run: Callable[[Sequence[Tensor]], None], held: Sequence[Held], into: Sequence[Held],
        written: Sequence[Held] = (),
    ) -> None:  # fmt: skip
        """Work that was just given to `line`. Its targets are NaN from now on, where no earlier work needs them."""
        with self._gpu.ledger.lock:
            piece = Piece(next(self._numbers), line, dict(line.clock), run, held, into, written)
            busy = {id(h.memory) for other in self._waiting() for h in other.held}
            self._pieces.setdefault(line.number, deque()).append(piece)
            if busy.isdisjoint(id(h.memory) for h in into):
                self._begin([piece])
            self._begin(self._ready())
            self.settle(self._gpu.ledger.host.clock)

    def _finish(self, piece: Piece) -> None:
        self._begin([piece])
        self._pieces[piece.line.number].remove(piece)
        piece.run(piece.saved)
        for storage in filter(None, (heir() for heir in piece.heirs)):
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)  # of real numbers NaN
        mine = {id(h.memory) for h in (*piece.into, *piece.written)}
        for other in self._waiting(piece.clock):  # which come first, whenever they are done here
            there = [(heir, heir()) for heir in other.heirs]
            other.heirs = [heir for heir, x in there if x is not None and id(self._gpu.ledger.find(x)) not in mine]

    def allocates(self, storage: torch.UntypedStorage, line: Line | None) -> None:
        """Work that waits may write this instead of what it was given, where nobody else holds that any more."""
        for piece in self._pieces.get(line.number, ()) if line is not None else ():
            own = [h.storage for h in piece.written if h.memory.line is line and h.storage is not None]
            if any(torch._C._storage_Use_Count(x._cdata) == 1 for x in own):
                piece.heirs.append(weakref.ref(storage))

    def waited(self, line: Line) -> None:
        """What `line` frees from now on nobody else has before this work is over."""
        for held in (held for piece in self._waiting(line.clock) for held in piece.held if held.memory.line is line):
            held.keep()

    def arrival(self, line: Line, carried: Any, copies: Sequence[Tensor], reads: Any, writes: Any) -> Any:
        """What is sent must be the same when it has arrived."""
        there = {x.untyped_storage()._cdata for x in writes}
        own = [x for x in reads if x.untyped_storage()._cdata not in there]
        with self._gpu.state(quiet=True, true_device=True), torch.no_grad():
            held = [Held(self._gpu, x, keeps=self._compute_is_late, read=True) for x in (*writes, *own)]
            into, sent = held[: len(writes)], [x.clone() for x in own]

        def run(_: Sequence[Tensor]) -> None:
            carried.wait()
            for target, came in zip(into, copies, strict=False):
                if (x := target.find()) is not None:
                    x.copy_(came)
                else:
                    self.wrong.append(f"a message on {line.name} arrives in memory that has gone")
            if any(not torch.equal(h.read(), x) for h, x in zip(held[len(into) :], sent, strict=True)):
                self.wrong.append(f"what is sent on {line.name} changes meanwhile")

        if line is self._gpu.current.line and not self.is_late(line):
            carried.wait()
            return carried, copies
        self.put_off(line, run, held, into)
        return SimpleNamespace(wait=lambda: None), []

    def settle(self, clock: Clock) -> None:
        """Does all that is over at `clock`, and no more."""
        with self._gpu.ledger.lock, self._gpu.state(quiet=True, true_device=True), torch.no_grad():
            while ready := [p for p in self._ready() if p.time <= clock.get(p.line.number, 0)]:
                self._finish(max(ready, key=lambda piece: piece.number))
            self._begin(self._ready())

    def provide(self, reads: Sequence[Tensor], clock: Clock) -> None:
        """Of what is over at `clock` only what these depend on."""
        memories, needed = {id(self._gpu.ledger.of(x)) for x in reads}, []
        with self._gpu.ledger.lock, self._gpu.state(quiet=True, true_device=True), torch.no_grad():
            for piece in sorted(self._waiting(clock), key=lambda piece: -piece.number):
                if not memories.isdisjoint(own := {id(held.memory) for held in piece.held}):
                    memories |= own
                    needed.append(piece)
            for piece in reversed(needed):
                self._finish(piece)

    def keep(self, x: Tensor, line: Line) -> None:
        """`record_stream`."""
        memory = self._gpu.ledger.of(x)
        for held in (h for piece in self._pieces.get(line.number, ()) for h in piece.held if h.memory is memory):
            held.keep()

    def changes(self, memories: Iterable[Memory]) -> None:
        """What waits for them may find something else there."""
        changed = set(map(id, memories))
        with self._gpu.state(quiet=True, true_device=True):
            for held in (h for p in (self._waiting() if changed else ()) for h in p.held if id(h.memory) in changed):
                held.changes()

    def _waiting(self, clock: Clock | None = None) -> list[Piece]:
        """All pieces; of a clock those that are over at it."""
        pieces = (piece for pieces in self._pieces.values() for piece in pieces)
        return [p for p in pieces if clock is None or p.time <= clock.get(p.line.number, 0)]

    def _ready(self) -> list[Piece]:
        """Pieces with no other before them."""
        first = [pieces[0] for pieces in self._pieces.values() if pieces]
        return [p for p in first if all(x.time > p.clock.get(x.line.number, 0) for x in first if x is not p)]

    def _begin(self, pieces: Iterable[Piece]) -> None:
        with self._gpu.state(quiet=True, true_device=True), torch.no_grad():
            for piece in (piece for piece in pieces if not piece.begun):
                piece.begun = True
                for x in (target.read() for target in piece.into):
                    piece.saved.append(x.clone())
                    x.fill_(_nothing(x.dtype))


def _nothing(dtype: torch.dtype) -> Any:
    """What stands where nothing was computed yet."""
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0
