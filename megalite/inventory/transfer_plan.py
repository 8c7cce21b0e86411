"""How a tensor goes from one stage to the next where the two lie on unlike numbers of ranks (cross-mesh resharding,
Zhuang et al. 2023, arXiv:2211.05322). Pure: the same on all ranks; `comm.mesh_channel` carries it out, the planner
prices it.

A boundary tensor `[s, b, h]` lies on the sending ranks as tiles (parts of the sequence, or a copy on each) and is
wanted on the receiving ranks as other tiles. A unit task is the common part of a tile that is there and one that is
wanted; of the ranks that hold it, the one that has least to send so far sends it:

    sequence parallel, 2 -> 3      copies, 1 -> 2 directly      copies, 1 -> 2 gathered
    [ 0  | 1  ]                    [    0    ]                  [    0    ]
    [0 | 1 | 2]  each part once    to 0, to 1: twice            half to 0, half to 1: once; then 0 and 1 swap

Gathered, a tensor crosses the link between the stages once, whatever the number of receivers (Megatron-LM's
scatter/gather); where these are on several hosts, their swap takes as long again. Relayed, chunks go from the first
receiver to the last, each of which sends one on while the next one arrives: a pipelined broadcast.

    to A hosts of B ranks, by the time of one copy over a host's link      directly A B      relayed 1 + (A - 1) / K
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from megalite.inventory.boxes import Box
from megalite.inventory.parameter_placement import Shape

ROUNDS = 100
CHUNKS = 16
"""K: parts of a tensor that is relayed. More make the chain shorter and its messages smaller."""
DIRECT, GATHERED, RELAYED = "direct", "gathered", "relayed"


class Transfer(NamedTuple):
    """A part of the tensor that one rank sends to another. Ranks count within their own stage."""

    box: Box
    sender: int
    receiver: int


class TransferPlan(NamedTuple):
    """source, target: what each rank holds, and what arrives there. tasks: in the order in which each rank sends and
    posts. way: gathered, if parts arrive that are then put together among the receivers; relayed, if the first one gets
    all of them and each sends them on to the next.
    """

    source: tuple[Box, ...]
    target: tuple[Box, ...]
    tasks: tuple[Transfer, ...]
    way: str


def tiles(shape: Shape, parts: int, *, split: bool) -> tuple[Box, ...]:
    """What each of `parts` ranks holds: its part of the sequence (dimension 0), or with `split` False all of it."""
    whole = Box.whole(shape)
    if not split:
        return (whole,) * parts
    length = shape[0]
    return tuple(whole.rows(length * i // parts, length * (i + 1) // parts) for i in range(parts))


def fastest_way(senders: int, receivers: int, copies: int) -> str:
    """How `copies` copies go from so many hosts to so many others, by the time of the busiest host's link; that of one
    copy is 1."""
    alike = min(senders, receivers)
    times = {
        DIRECT: copies / alike,
        GATHERED: 1 / alike + (receivers - 1) / receivers,
        RELAYED: 1 + (receivers - 1) / CHUNKS,
    }
    return min(times, key=lambda way: times[way])


@cache
def transfer_plan(shape: Shape, senders: int, receivers: int, *, split: bool, way: str) -> TransferPlan:
    """The plan for a tensor of `shape` from so many ranks to so many others, of which each has its part of the sequence
    (`split`) or all of it.

    way: of copies to several receivers, gathered only where the sequence comes out even; all else goes directly.
    """
    if split or receivers == 1 or (way == GATHERED and shape[0] % receivers):
        way = DIRECT
    source = tiles(shape, senders, split=split)
    target = tiles(shape, receivers, split=split or way == GATHERED)
    wanted = list(enumerate(target))
    if way == RELAYED:
        wanted = [(0, chunk) for chunk in tiles(shape, min(CHUNKS, shape[0]), split=True)]
    load = [0] * senders
    tasks: list[Transfer] = []
    for receiver, box in wanted:
        for part in sorted({common for held in source if (common := held.intersect(box))}):
            holders = [rank for rank, held in enumerate(source) if held.intersect(part) == part]
            sender = min(holders, key=load.__getitem__)
            load[sender] += part.numel
            tasks.append(Transfer(part, sender, receiver))
    ordered = tasks if way == RELAYED else in_rounds(tasks)  # they arrive one behind the other
    return TransferPlan(source, target, tuple(ordered), way)


def in_rounds(tasks: Sequence[Transfer]) -> list[Transfer]:
    """The tasks in an order in which as many as can go at the same time: rounds in which no rank sends or receives
    twice, the fewest of `ROUNDS` random greedy tries; the same everywhere, the seed is fixed."""
    rng = random.Random(0)
    tried = (rng.sample(tasks, len(tasks)) for _ in range(ROUNDS if len(tasks) > 2 else 0))
    return [task for one in min(map(_greedy, (tasks, *tried)), key=len) for task in one]


def _greedy(tasks: Sequence[Transfer]) -> list[list[Transfer]]:
    """Each task in the first round in which both of its ranks are free."""
    rounds: list[list[Transfer]] = []
    for task in tasks:
        taken = (any(task.sender == one.sender or task.receiver == one.receiver for one in now) for now in rounds)
        number = next((number for number, busy in enumerate(taken) if not busy), len(rounds))
        rounds += [[]] * (number == len(rounds))
        rounds[number] = [*rounds[number], task]
    return rounds
