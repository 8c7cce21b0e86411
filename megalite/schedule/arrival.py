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
from typing import TYPE_CHECKING

from megalite.schedule.action import BACKWARD, COMMUNICATION_KINDS, FORWARD, Action
from megalite.schedule.passes import insert_communication
from megalite.schedule.program import BatchRange, BatchSpec, Program

if TYPE_CHECKING:
    from megalite.schedule.simulate import Time


def share_of(rank: int, ranks: int, limit: int) -> int:
    """Micro-batches up to which a rank of several prefers forwards to backwards."""
    return limit - rank * (limit - 1) // (ranks - 1) if ranks > 1 else 1


def arrival_orders(
    ranks: int, sizes: Sequence[int], limit: int, takes: Callable[[int, str], Time], hop: Time
) -> list[list[tuple[str, int]]]:
    """What each rank runs in a run of batches of these sizes: (F or B, micro-batch). takes: (rank, kind) -> time."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    orders: list[list[tuple[str, int]]] = [[] for _ in range(ranks)]
    clocks: list[Time] = [0] * ranks
    counts = [{FORWARD: 0, BACKWARD: 0} for _ in range(ranks)]
    here: list[dict[str, list[Time]]] = [{FORWARD: [], BACKWARD: []} for _ in range(ranks)]  # since when inputs are
    here[0][FORWARD] = [0] * ends[-1]

    def look(rank: int) -> tuple[Time, str] | None:
        """(When, what) a rank runs next."""
        begun, ended, inputs, found = counts[rank][FORWARD], counts[rank][BACKWARD], here[rank], []
        end = next((end for end in ends if end > ended), 0)
        if ended < min(begun, len(inputs[BACKWARD])):
            found.append((max(clocks[rank], inputs[BACKWARD][ended]), BACKWARD))
        if begun < min(end, ended + limit, len(inputs[FORWARD])):
            found.append((max(clocks[rank], inputs[FORWARD][begun]), FORWARD))
        if len(found) == 2 and found[0][0] == found[1][0]:
            return found[begun - ended < share_of(rank, ranks, limit)]
        return min(found, default=None)

    found = [look(rank) for rank in range(ranks)]
    for _ in range(2 * ranks * ends[-1]):
        start, kind, rank = min((*item, rank) for rank, item in enumerate(found) if item is not None)
        orders[rank].append((kind, counts[rank][kind]))
        counts[rank][kind] += 1
        clocks[rank] = start + takes(rank, kind)
        if kind == BACKWARD and rank:
            here[rank - 1][BACKWARD].append(clocks[rank] + hop)
        elif kind == FORWARD and rank + 1 < ranks:
            here[rank + 1][FORWARD].append(clocks[rank] + hop)
        elif kind == FORWARD:
            here[rank][BACKWARD].append(clocks[rank])
        for changed in range(max(rank - 1, 0), min(rank + 2, ranks)):
            found[changed] = look(changed)
    return orders


def as_arrives(program: Program, takes: Callable[[Action], Time], hop: Time, run: BatchSpec) -> Program:
    """A message-driven program in the order that these times give it. run: the batches in which it is looked at."""
    batches = program.batches(run)
    keys = [(rank, kind) for rank in range(program.num_ranks) for kind in (FORWARD, BACKWARD)]
    times, sizes = {key: takes(Action(key[1], key[0], 0)) for key in keys}, [batch.size for batch in batches]
    orders = arrival_orders(program.num_ranks, sizes, program.max_in_flight, lambda *key: times[key], hop)
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
