"""Checks over all ranks: what they exchange is the same on both ends (1), and no circle of them waits for itself (2).

A call begins when the calls before it on its rank are over (`Call.after`), and is over when the calls that belong to it
on the other ranks have begun: nobody is taken to buffer anything. Ranks that were not rehearsed do what their like do.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product, zip_longest
from typing import Any, TypeVar

from megalite.rehearsal.record import SEND, Call, Communicator, RankRecord

Records = Mapping[int, RankRecord]
Node = tuple[int, int]
"""(rank, number of the call)"""
T = TypeVar("T")
MOST_HOPS = 12


@dataclass(frozen=True)
class Fault:
    """check: which one found it. text: what, ranks or streams, lines, what to change. warns: not sure to stop a run."""

    check: str
    text: str
    warns: bool = False

    def __str__(self) -> str:
        return f"{'warning: ' if self.warns else ''}{self.check}: {self.text}"


Pair = tuple[Communicator, int, int]
"""(communicator, sender, receiver)"""


def lined_up(
    records: Records,
) -> tuple[dict[Communicator, dict[int, list[Node]]], dict[Pair, tuple[list[Node], list[Node]]]]:
    """(Communicator -> its collectives on each of its ranks, of which there may be none; pair -> what is sent, what is
    received), of ranks that were rehearsed."""
    collectives: dict[Communicator, dict[int, list[Node]]] = {}
    messages: dict[Pair, tuple[list[Node], list[Node]]] = {}
    for rank, record in records.items():
        for number, call in enumerate(record.calls):
            members, sends = call.communicator, call.kind == SEND
            if call.peer is None:
                if members not in collectives:
                    collectives[members] = {other: [] for other in members.ranks if other in records}
                collectives[members][rank].append((rank, number))
            elif call.peer in records:
                ends = (rank, call.peer) if sends else (call.peer, rank)
                messages.setdefault((members, *ends), ([], []))[not sends].append((rank, number))
    return collectives, messages


def match(records: Records) -> list[Fault]:
    """Check 1."""
    collectives, messages = lined_up(records)
    faults = [*_communicators(records)]
    for members, by_rank in collectives.items():
        calls = {rank: [records[r].calls[n] for r, n in nodes] for rank, nodes in by_rank.items()}
        faults += [*_collectives(members, calls), *_tables(members, calls)]
    for pair, ends in messages.items():
        faults += _messages(pair, *([records[r].calls[n] for r, n in nodes] for nodes in ends))
    for rank, record in records.items():
        for call in record.unwaited[:1]:
            text = f"rank {rank}: nobody waits for {call}, in {call.phase}; call wait() of its handle before what"
            faults.append(Fault("match", f"{text} it writes is read and what it reads is overwritten"))
    return list(dict.fromkeys(faults))


def differ(one: Sequence[Any], other: Sequence[Any], key: Callable[[Any], Any] = lambda x: x) -> int | None:
    """Where the two begin to differ."""
    same = [key(a) == key(b) for a, b in zip(one, other, strict=False)]
    at = same.index(False) if False in same else len(same)
    return at if at < max(len(one), len(other)) else None


def _communicators(records: Records) -> Iterable[Fault]:
    """To make one is collective over the world."""
    first, *others = records
    for rank in others:
        one, other = records[first].made, records[rank].made
        if (at := differ(one, other)) is not None:
            told = [_made(made, at) for made in (one, other)]
            text = f"rank {first} {told[0]}, and rank {rank} {told[1]}: every rank makes every communicator, in one"
            yield Fault("match", f"{text} order; make it on all of them")
            return


def _made(made: Sequence[tuple[str, int, int]], at: int) -> str:
    if at >= len(made):
        return "makes no further communicator"
    place, count, _ = made[at]
    return f"makes {'a communicator' if count == 1 else f'{count} communicators'} at {place}"


def _collectives(members: Communicator, calls: Mapping[int, Sequence[Call]]) -> Iterable[Fault]:
    first, *others = calls
    for rank in others:
        if (at := differ(calls[first], calls[rank], lambda call: call.what)) is not None:
            one, other = (f"rank {each} starts {or_nothing(calls[each], at)}" for each in (first, rank))
            text = f"collective {at + 1} of {members}: {one}\n    and {other}"
            yield Fault("match", f"{text}\n    all of its ranks must start the same ones in the same order")
            return


def or_nothing(calls: Sequence[Call], at: int) -> str:
    if at < len(calls):
        return f"{calls[at]}, in {calls[at].phase}"
    return f"no further one after {calls[-1]}" if calls else "no further one"


def _tables(members: Communicator, calls: Mapping[int, Sequence[Call]]) -> Iterable[Fault]:
    """The rows that one rank sends are those that the other expects."""
    place = {rank: members.ranks.index(rank) for rank in calls}
    for each in zip(*calls.values(), strict=False):
        for (sender, sent), (target, received) in product(zip(calls, each, strict=True), repeat=2):
            if not (sent.sent and received.received):
                continue
            rows, expected = sent.sent[place[target]], received.received[place[sender]]
            if rows != expected:
                text = f"rank {sender} sends rank {target} {rows} rows by {sent}\n    and rank {target} expects"
                yield Fault("match", f"{text} {expected} by {received}\n    both must come from one table")
                return


def _messages(pair: Pair, out: Sequence[Call], into: Sequence[Call]) -> Iterable[Fault]:
    members, source, target = pair
    alike = len({call.action.startswith(("send", "receive")) for call in (*out, *into) if call.action}) < 2
    if (at := differ(out, into, lambda call: call.message if alike else call.message[:2])) is not None:
        text = f"message {at + 1} of {len(out)} from rank {source} to rank {target} ({len(into)} are received, "
        text += f"{members}): rank {source} starts {or_nothing(out, at)}\n    and rank {target} starts "
        text += f"{or_nothing(into, at)}\n    each send needs its receive, of the same bytes and type"
        yield Fault("match", text)


# ---- check 2 ---------------------------------------------------------------------------------------------------------


def deadlock(records: Records) -> list[Fault]:
    """Check 2: with communicators that do not hinder one another, and with one collective of a device at a time."""
    if (circle := _circle(records, one_at_a_time=False)) is not None:
        return [Fault("deadlock", f"{circle}\n    let one of them start what the other waits for first")]
    if (circle := _circle(records, one_at_a_time=True)) is not None:
        advice = "NCCL promises no two collectives of a device at one time: start them in one order on all ranks"
        return [Fault("deadlock", f"{circle}\n    {advice}", warns=True)]
    return []


def _after(records: Records, *, one_at_a_time: bool) -> dict[Node, Sequence[Node]]:
    """Each call -> those of its rank that are over before it begins."""
    found: dict[Node, Sequence[Node]] = {}
    for rank, record in records.items():
        last: list[Node] = []
        for number, call in enumerate(record.calls):
            behind = [(rank, n) for n in call.after]
            if one_at_a_time and call.peer is None:
                behind, last = behind + last, [(rank, number)]
            found[rank, number] = behind
    return found


def progress(after: Mapping[T, Sequence[T]], partners: Mapping[T, Sequence[T]]) -> Iterator[tuple[T, Sequence[T]]]:
    """Each that begins once those that it is behind are over, and who is over then: itself, of partners all with the
    last that begins."""
    left, later = {each: len(behind) for each, behind in after.items()}, defaultdict[T, list[T]](list)
    absent = {id(group): len(group) for group in partners.values()}
    for each, behind in after.items():
        for before in behind:
            later[before].append(each)
    ready = [each for each, n in left.items() if n == 0]
    while ready:
        each = ready.pop()
        group: Sequence[T] = partners.get(each, (each,))
        if each in partners:
            absent[id(group)] -= 1
            group = () if absent[id(group)] else group
        yield each, group
        for waits in (waits for over in group for waits in later[over]):
            left[waits] -= 1
            if left[waits] == 0:
                ready.append(waits)


def matched(records: Records) -> Iterable[Sequence[Node]]:
    """Calls that belong together: of a collective one for each rank, of a message its two ends; and (-1, 0) where one
    of them is missing."""
    collectives, messages = lined_up(records)
    for lines in (*(by_rank.values() for by_rank in collectives.values()), *messages.values()):
        yield from map(list, map(dict.fromkeys, zip_longest(*lines, fillvalue=(-1, 0))))


def _circle(records: Records, *, one_at_a_time: bool) -> str | None:
    """The circle that is stuck, rank by rank; where there is none, the call that waits for one that never comes."""
    after = _after(records, one_at_a_time=one_at_a_time)
    partners = {node: group for group in matched(records) for node in group}
    begun, over = set[Node](), set[Node]()
    for begins, ended in progress(after, partners):
        begun.add(begins)
        over.update(ended)
    stuck = [node for node in after if node not in over]
    path: list[Node] = []
    node = next((each for each in stuck if each in begun), stuck[0] if stuck else None)
    if node is None:
        return None
    while node is not None and node not in path:
        path.append(node)  # in vain it waits for a partner that does not begin, or for one of its own rank
        ahead, done = (partners.get(node, ()), begun) if node in begun else (after[node], over)
        node = next((other for other in ahead if other in after and other not in done), None)
    if node is None:  # a call whose partner never comes: check 1 has told it
        return None if one_at_a_time else f"{_told(records, path[-1])} waits for a call that nobody starts"
    hops = path[path.index(node) :]
    ring = [hops[0][0], *(there for (here, _), (there, _) in pairwise([*hops, node]) if here != there)]
    lines = [f"{len(set(ring))} ranks wait in a circle: {' -> '.join(map(str, ring))}"]
    for here, there in zip(hops, [*hops[1:], node], strict=True):
        other = records[there[0]].calls[there[1]].kind
        how = f"waits for that of rank {there[0]}" if here[0] != there[0] else f"is behind its own {other}"
        lines.append(f"    {_told(records, here)} {how}")
    return "\n".join(lines[:MOST_HOPS])


def _told(records: Records, node: Node) -> str:
    call = records[node[0]].calls[node[1]]
    return f"rank {node[0]}: {call}"
