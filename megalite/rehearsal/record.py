"""What a rank does, as the checks over all ranks read it: collectives and messages, and what each of them is behind.

call     a collective or a message, in the order in which the host starts them
after    calls of the same rank that are over before it begins: of its stream, of streams and handles that its stream
         or the host has waited for, of its communicator
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from megalite.rehearsal.order import Ledger, Line
    from megalite.rehearsal.pieces import Piece

START_UP = "start-up"
SEND, RECV = "send", "recv"
LABEL = re.compile(r"forward|backward|mb\d+")
"""What of an action's words its message is called by on both ends."""


@dataclass(eq=False)
class Communicator:
    """ranks: its members, world ranks. number: how many of the same members were made before it. name: of its axis,
    once a mesh has been seen to hold it. said: (number of a gathering, rank) -> what that rank, which was rehearsed
    before, has given to it."""

    ranks: tuple[int, ...]
    number: int = 0
    name: str = ""
    said: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)

    def size(self) -> int:
        return len(self.ranks)

    def __str__(self) -> str:
        first = ", ".join(map(str, self.ranks[:4])) + (", ..." if len(self.ranks) > 4 else "")
        return f"{self.name or 'communicator'} of {len(self.ranks)} ranks ({first})"


class Communicators:
    """Those of all ranks that are rehearsed in this process, each one object."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], int], Communicator] = {}

    def of(self, ranks: Sequence[int], number: int) -> Communicator:
        return self._known.setdefault((key := tuple(ranks), number), Communicator(key, number))


@dataclass(eq=False, slots=True)
class Call:
    """A collective, or one end of a message.

    nbytes: of this rank's input, or where the kind gathers or scatters of one rank's part.
    peer: the other end of a message, a world rank. sent, received: rows to and from each rank of an uneven exchange.
    after: numbers of this rank's calls that are over when it begins. phase, action: what the rank was doing.
    """

    kind: str
    communicator: Communicator
    nbytes: int
    dtype: str
    place: str
    line: Line
    after: tuple[int, ...] = ()
    peer: int | None = None
    op: str = ""
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    phase: str = START_UP
    action: str = ""

    @property
    def what(self) -> tuple[str, int, str, str]:
        """What all ranks of a communicator must agree on."""
        return self.kind, self.nbytes, self.dtype, self.op

    @property
    def message(self) -> tuple[int, str, str]:
        """What both ends of a message must agree on: bytes, type, and of which micro-batch it is what."""
        return self.nbytes, self.dtype, " ".join(LABEL.findall(self.action))

    def canonical(self) -> tuple[object, ...]:
        """What it has in common with that of another rank of the same kind: shards need not be of one size."""
        return self.kind, self.dtype, self.op, self.communicator.name, self.phase, self.peer is not None and self.action

    def __str__(self) -> str:
        rows = f" of {sum(self.sent)} rows" if self.sent else f" of {self.nbytes:,} bytes"
        end = f" {'to' if self.kind == SEND else 'from'} rank {self.peer}" if self.peer is not None else ""
        op = f" ({self.op})" if self.op else ""
        action = f" ({self.action})" if self.action else ""
        return f"{self.kind}{end}{op}{rows}, {self.dtype},{action} at {self.place or 'a line outside the product'}"


class Calls(list[Call]):
    """The calls of one rank. phase, action: of those that follow."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._begun: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._last_of: dict[Communicator, int] = {}
        self.phase, self.action = START_UP, ""

    def enter(self, phase: str) -> None:
        """What follows belongs to another phase of the run."""
        self.phase = phase
        self._ledger.log.append(("phase", 0, 0, 0, phase))

    @contextmanager
    def mark(self, action: str) -> Iterator[None]:
        """Notes that what follows belongs to an action (`Executor.mark`)."""
        before, self.action = self.action, action
        self._ledger.log.append(("action", 0, 0, 0, action))
        try:
            yield
        finally:
            self.action = before
            self._ledger.log.append(("action", 0, 0, 0, before))

    def begin(self, call: Call, line: Line) -> None:
        """Notes a call that is the latest work of `line`."""
        number, after = len(self), set()
        for of, time in line.clock.items():
            if at := bisect_right(self._begun[of], (time, number)):
                after.add(self._begun[of][at - 1][1])
        if call.peer is None and (last := self._last_of.get(call.communicator)) is not None:
            after.add(last)
        self._last_of[call.communicator] = number
        call.after, call.phase, call.action = tuple(sorted(after)), self.phase, self.action
        self._begun[line.number].append((line.clock[line.number], number))
        self.append(call)
        self._ledger.log.append(("call", number, 0, 0, ""))


@dataclass
class RankRecord:
    """One rank's whole record. unwaited: handles that nobody has waited for: (what, place). made: communicators in the
    order of their making, as (place, how many lists of ranks, digest of them). lines: names of streams and threads."""

    rank: int
    calls: Sequence[Call]
    log: Sequence[tuple[str, int, int, int, str]] = ()
    unwaited: Sequence[Call] = ()
    made: Sequence[tuple[str, int, int]] = ()
    races: Sequence[str] = ()
    launches: int = 0
    problem: str | None = None
    pieces: Sequence[Piece] = ()
    lines: Sequence[str] = ()

    @property
    def phase(self) -> str:
        """That it came to."""
        return next((event[4] for event in reversed(self.log) if event[0] == "phase"), START_UP)
