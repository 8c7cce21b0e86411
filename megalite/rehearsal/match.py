"""Checks over all ranks: what they exchange is the same on both ends (1), and no circle of them waits for itself (2).

A call begins when the calls before it on its rank are over (`Call.after`), and is over when the calls that belong to it
on the other ranks have begun: nobody is taken to buffer anything. Ranks that were not rehearsed do what their like do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megalite.rehearsal.record import SEND, Call, Communicator, RankRecord

Records = Mapping[int, RankRecord]
Node = tuple[int, int]
"""(rank, number of the call)"""
MOST_HOPS = 12


@dataclass(frozen=True)
class Fault:
    """check: which one found it. text: what, ranks or streams, lines, what to change. warns: not sure to stop a run."""

    check: str
    text: str
    warns: bool = False

    def __str__(self) -> str:
        return f"{'warning: ' if self.warns else ''}{self.check}: {self.text}"


def match(records: Records) -> list[Fault]:
    """Check 1."""
    faults = [*_communicators(records), *_collectives(records), *_messages(records)]
    for rank, record in records.items():
        for call in record.unwaited[:1]:
            faults.append(
                Fault(
                    "match",
                    f"rank {rank}: nobody waits for {call}, in {call.phase}; call wait() of its handle before what "
                    "it writes is read and what it reads is overwritten",
                )
            )
    return list(dict.fromkeys(faults))


def _communicators(records: Records) -> Iterable[Fault]:
    """To make one is collective over the world."""
    first, *others = records
    for rank in others:
        one, other = records[first].made, records[rank].made
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        if at < max(len(one), len(other)):
            told = [_made(made, at) for made in (one, other)]
            yield Fault(
                "match",
                f"rank {first} {told[0]}, and rank {rank} {told[1]}: every rank makes every communicator, in one "
                "order; make it on all of them",
            )
            return


def _made(made: Sequence[tuple[str, int, int]], at: int) -> str:
    if at >= len(made):
        return "makes no further communicator"
    place, count, _ = made[at]
    return f"makes {'a communicator' if count == 1 else f'{count} communicators'} at {place}"


def _collectives(records: Records) -> Iterable[Fault]:
    for members, calls in by_communicator(records).items():
        first, *others = calls
        for rank in others:
            one, other = calls[first], calls[rank]
            pairs = zip(one, other, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a.what != b.what), min(len(one), len(other)))
            if at < max(len(one), len(other)):
                told = [_or_nothing(each, at) for each in (one, other)]
                yield Fault(
                    "match",
                    f"collective {at + 1} of {members}: rank {first} starts {told[0]}\n    and rank {rank} starts "
                    f"{told[1]}\n    all of its ranks must start the same ones in the same order",
                )
                break
        yield from _tables(members, calls)


def _or_nothing(calls: Sequence[Call], at: int) -> str:
    if at < len(calls):
        return f"{calls[at]}, in {calls[at].phase}"
    last = f" after {calls[-1]}" if calls else ""
    return f"no further one{last}"


def _tables(members: Communicator, calls: Mapping[int, Sequence[Call]]) -> Iterable[Fault]:
    """The rows that one rank sends are those that the other expects."""
    place = {rank: members.ranks.index(rank) for rank in calls}
    for each in zip(*calls.values(), strict=False):
        by_rank = dict(zip(calls, each, strict=True))
        for sender, sent in by_rank.items():
            for target, received in by_rank.items():
                if not (sent.sent and received.received):
                    continue
                rows, expected = sent.sent[place[target]], received.received[place[sender]]
                if rows != expected:
                    yield Fault(
                        "match",
                        f"rank {sender} sends rank {target} {rows} rows by {sent}\n    and rank {target} expects "
                        f"{expected} by {received}\n    both must come from one table",
                    )
                    return


def by_communicator(records: Records) -> dict[Communicator, dict[int, list[Call]]]:
    """Communicator -> its collectives on each of its ranks, of which there may be none."""
    found: dict[Communicator, dict[int, list[Call]]] = {}
    for record in records.values():
        for call in record.calls:
            if call.peer is None and call.communicator not in found:
                found[call.communicator] = {rank: [] for rank in call.communicator.ranks if rank in records}
    for rank, record in records.items():
        for call in record.calls:
            if call.peer is None and rank in found[call.communicator]:
                found[call.communicator][rank].append(call)
    return found


Pair = tuple[Communicator, int, int]
"""(communicator, sender, receiver)"""


def by_pair(records: Records) -> tuple[dict[Pair, list[Node]], dict[Pair, list[Node]]]:
    """(Sends, receives) between ranks that were both rehearsed."""
    sends: dict[Pair, list[Node]] = defaultdict(list)
    receives: dict[Pair, list[Node]] = defaultdict(list)
    for rank, record in records.items():
        for number, call in enumerate(record.calls):
            if call.peer is None or call.peer not in records:
                continue
            ends = (rank, call.peer) if call.kind == SEND else (call.peer, rank)
            (sends if call.kind == SEND else receives)[call.communicator, *ends].append((rank, number))
    return sends, receives


def _messages(records: Records) -> Iterable[Fault]:
    sends, receives = by_pair(records)
    for pair in dict.fromkeys((*sends, *receives)):
        members, source, target = pair
        out, into = ([records[rank].calls[n] for rank, n in each.get(pair, [])] for each in (sends, receives))
        at = next(
            (i for i, (a, b) in enumerate(zip(out, into, strict=False)) if a.message != b.message),
            min(len(out), len(into)),
        )
        if at < max(len(out), len(into)):
            yield Fault(
                "match",
                f"message {at + 1} of {len(out)} from rank {source} to rank {target} ({len(into)} are received, "
                f"{members}): "
                f"rank {source} starts {_or_nothing(out, at)}\n    and rank {target} starts {_or_nothing(into, at)}\n"
                "    each send needs its receive, of the same bytes and type",
            )


# ---- check 2 ---------------------------------------------------------------------------------------------------------


def deadlock(records: Records) -> list[Fault]:
    """Check 2: with communicators that do not hinder one another, and with one collective of a device at a time."""
    if (circle := _circle(records, one_at_a_time=False)) is not None:
        return [Fault("deadlock", f"{circle}\n    let one of them start what the other waits for first")]
    if (circle := _circle(records, one_at_a_time=True)) is not None:
        advice = "NCCL promises no two collectives of a device at one time: start them in one order on all ranks"
        return [Fault("deadlock", f"{circle}\n    {advice}", warns=True)]
    return []


class _Waits:
    """Who waits for whom. partners: the calls on other ranks that must have begun before one is over."""

    def __init__(self, records: Records, *, one_at_a_time: bool) -> None:
        self.records = records
        self.after: dict[Node, Sequence[Node]] = {}
        self.partners: dict[Node, Sequence[Node]] = {}
        for rank, record in records.items():
            last: Node | None = None
            for number, call in enumerate(record.calls):
                behind = [(rank, n) for n in call.after]
                if one_at_a_time and call.peer is None:
                    behind += [last] if last is not None else []
                    last = (rank, number)
                self.after[rank, number] = behind
        for group in matched(records):
            for node in group:
                self.partners[node] = group

    def stuck(self) -> dict[Node, bool]:
        """Calls that never end -> whether they begin."""
        left = {node: len(behind) for node, behind in self.after.items()}
        missing = {id(group): len(group) for group in self.partners.values()}
        behind_of: dict[Node, list[Node]] = defaultdict(list)
        for node, behind in self.after.items():
            for before in behind:
                behind_of[before].append(node)
        ready, begun, over = [node for node, n in left.items() if n == 0], set[Node](), set[Node]()
        while ready:
            node = ready.pop()
            begun.add(node)
            group = self.partners.get(node, (node,))
            if node in self.partners:
                missing[id(group)] -= 1
                if missing[id(group)]:
                    continue
            for each in group:
                over.add(each)
                for after in behind_of[each]:
                    left[after] -= 1
                    if left[after] == 0:
                        ready.append(after)
        return {node: node in begun for node in self.after if node not in over}


def matched(records: Records) -> Iterable[Sequence[Node]]:
    """Calls that belong together: of a collective one for each rank, of a message its two ends."""
    numbers: dict[Communicator, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, record in records.items():
        for number, call in enumerate(record.calls):
            if call.peer is None:
                numbers[call.communicator][rank].append(number)
    for members, by_rank in numbers.items():
        ranks = [rank for rank in members.ranks if rank in records]
        for i in range(max(map(len, by_rank.values()))):
            group = [(rank, by_rank[rank][i]) for rank in ranks if i < len(by_rank[rank])]
            yield group if len(group) == len(ranks) else [*group, (-1, 0)]
    sends, receives = by_pair(records)
    for pair in dict.fromkeys((*sends, *receives)):
        out, into = sends.get(pair, []), receives.get(pair, [])
        yield from ([a, b] for a, b in zip(out, into, strict=False))
        yield from ([a, (-1, 0)] for a in (out[len(into) :] or into[len(out) :]))


def _circle(records: Records, *, one_at_a_time: bool) -> str | None:
    """The circle that is stuck, rank by rank; where there is none, the call that waits for one that never comes."""
    waits = _Waits(records, one_at_a_time=one_at_a_time)
    stuck = waits.stuck()
    if not stuck:
        return None
    path: list[Node] = []
    node: Node | None = next((node for node, begins in stuck.items() if begins), None) or next(iter(stuck))
    while node is not None and node not in path:
        path.append(node)
        node = _blamed(waits, stuck, node)
    if node is None:  # a call whose partner never comes: check 1 has told it
        return None if one_at_a_time else f"{_told(records, path[-1])} waits for a call that nobody starts"
    hops = path[path.index(node) :]
    lines = [f"{len({rank for rank, _ in hops})} ranks wait in a circle"]
    for here, there in zip(hops, [*hops[1:], node], strict=True):
        other = records[there[0]].calls[there[1]].kind
        how = f"waits for that of rank {there[0]}" if here[0] != there[0] else f"is behind its own {other}"
        lines.append(f"    {_told(records, here)} {how}")
    return "\n".join(lines[:MOST_HOPS])


def _blamed(waits: _Waits, stuck: Mapping[Node, bool], node: Node) -> Node | None:
    """A call that `node` waits for in vain."""
    if stuck[node]:
        absent = [other for other in waits.partners.get(node, ()) if other in stuck and not stuck[other]]
        return absent[0] if absent else None
    return next(before for before in waits.after[node] if before in stuck)


def _told(records: Records, node: Node) -> str:
    call = records[node[0]].calls[node[1]]
    return f"rank {node[0]}: {call}"
