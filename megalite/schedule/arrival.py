"""In which order actions come when each rank runs whatever has arrived (AxoNN's message-driven execution).

A rank of p, each with one stage, runs forwards and backwards in the order of the micro-batches, because that is how
their messages come. Only how the two take turns depends on time: it runs what is here, and waits where nothing is. If
both are, a forward goes first while the rank holds fewer micro-batches than its share of the limit L, then a backward.
Shares fall from L on the first rank to 1 on the last one: with L = p they are those of 1F1B, with 2p-1 those of eager
1F1B, and where times are equal a batch takes as long.

The first rank begins a forward while fewer than L micro-batches are between their forward and backward there, and so in
the whole pipeline. What a rank adds up, and in which order, is the same for any times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING

from megalite.schedule.action import BACKWARD, COMMUNICATION_KINDS, FORWARD, Action
from megalite.schedule.passes import insert_communication
from megalite.schedule.program import BatchRange, BatchSpec, Program

if TYPE_CHECKING:
    from megalite.schedule.simulate import Costs, Time


def share_of(rank: int, ranks: int, limit: int) -> int:
    """Micro-batches up to which a rank of several prefers forwards to backwards."""
    return limit - rank * (limit - 1) // (ranks - 1) if ranks > 1 else 1


class _Rank:
    """forwards, backwards: when the inputs of those that have been sent are here, by micro-batch."""

    def __init__(self) -> None:
        self.clock: Time = 0
        self.forwards: list[Time] = []
        self.backwards: list[Time] = []
        self.order: list[tuple[str, int]] = []
        self.counts = {FORWARD: 0, BACKWARD: 0}

    def next(self, end: int, limit: int, share: int) -> tuple[Time, str] | None:
        """(When, what) it runs next; the batch has the micro-batches below `end`."""
        begun, ended = self.counts[FORWARD], self.counts[BACKWARD]
        found = []
        if ended < min(begun, len(self.backwards)):
            found.append((max(self.clock, self.backwards[ended]), BACKWARD))
        if begun < min(end, ended + limit, len(self.forwards)):
            found.append((max(self.clock, self.forwards[begun]), FORWARD))
        if len(found) == 2 and found[0][0] == found[1][0]:
            return found[begun - ended < share]
        return min(found, default=None)


def arrival_orders(
    ranks: int, sizes: Sequence[int], limit: int, takes: Callable[[int, str], Time], hop: Time
) -> list[list[tuple[str, int]]]:
    """What each rank runs in a run of batches of these sizes: (F or B, micro-batch). takes: (rank, kind) -> time."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    each = [_Rank() for _ in range(ranks)]
    each[0].forwards = [0] * ends[-1]

    def look(rank: int) -> tuple[Time, str] | None:
        one = each[rank]
        end = next((end for end in ends if end > one.counts[BACKWARD]), 0)
        return one.next(end, limit, share_of(rank, ranks, limit))

    found = [look(rank) for rank in range(ranks)]
    for _ in range(2 * ranks * ends[-1]):
        start, kind, rank = min((*item, rank) for rank, item in enumerate(found) if item is not None)
        one = each[rank]
        one.order.append((kind, one.counts[kind]))
        one.counts[kind] += 1
        one.clock = start + takes(rank, kind)
        if kind == BACKWARD and rank:
            each[rank - 1].backwards.append(one.clock + hop)
        elif kind == FORWARD and rank + 1 < ranks:
            each[rank + 1].forwards.append(one.clock + hop)
        elif kind == FORWARD:
            one.backwards.append(one.clock)
        for changed in range(max(rank - 1, 0), min(rank + 2, ranks)):
            found[changed] = look(changed)
    return [one.order for one in each]


def as_arrives(program: Program, costs: Costs, run: BatchSpec) -> Program:
    """A message-driven program in the order that these times give it. run: the batches in which it is looked at."""
    batches = program.batches(run)
    keys = [(rank, kind) for rank in range(program.num_ranks) for kind in (FORWARD, BACKWARD)]
    times = [*(costs.of(Action(kind, rank, 0), program) for rank, kind in keys), costs.communication]
    if all(isinstance(time, int | Fraction) for time in times):  # integers compare in a tenth of the time of fractions
        unit = lcm(*(Fraction(time).denominator for time in times))
        times = [int(time * unit) for time in times]
    takes, sizes = dict(zip(keys, times, strict=False)), [batch.size for batch in batches]
    orders = arrival_orders(program.num_ranks, sizes, program.max_in_flight, lambda *key: takes[key], times[-1])
    before = {batch.iteration: sum(each.size for each in batches[:number]) for number, batch in enumerate(batches)}

    def order(rank: int, batch: BatchRange) -> list[Action]:
        begin = before[batch.iteration]
        turns = iter(orders[rank][2 * begin : 2 * (begin + batch.size)])
        out = []
        for action in program.order(rank, batch):
            if action.is_compute:
                kind, number = next(turns)
                action = action._replace(kind=kind, microbatch=number - begin + batch.start)
            if action.kind not in COMMUNICATION_KINDS:
                out.append(action)
        return out

    arranged = replace(program, order=order, has_communication=False)
    return insert_communication(arranged) if program.has_communication else arranged
