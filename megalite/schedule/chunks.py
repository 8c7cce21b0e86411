"""Weights that live on the host: which layers' are on the device, and when each comes and goes.

    uses      F0: embedding 0 1 2 head   B0: head 2 1 0 embedding   F1: ...     what a rank's list reads
    room 3    come  embedding 0 | 1 | 2 | head | 1 | 0 | embedding | ...         one use ahead
              leave           embedding | 0 | ...                                the farthest next use

A program says which layers' weights are read in which order, so what to let go is known before the run
(`eviction.py`). The host's copy is the truth: a weight that leaves is dropped, and only what comes is a transfer. It
starts one use ahead, if there is room, and has the time of one layer's computation. After the STEP everything on the
device is old.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from typing import NamedTuple, TypeVar

from megalite.errors import ScheduleError
from megalite.schedule.action import BACKWARD, BACKWARD_INPUT, FORWARD, RECOMPUTE, Action
from megalite.schedule.eviction import belady
from megalite.schedule.program import Program, WeightChunks

ChunkKey = tuple[int, int, int]  # (stage, replica, layer of the stage)
K = TypeVar("K", bound=Hashable)


class ChunkUse(NamedTuple):
    """One step of a plan: while `wanted` is read."""

    action: int  # its place in the rank's list
    wanted: tuple[ChunkKey, ...]
    leave: tuple[ChunkKey, ...]  # what is let go before it
    come: tuple[ChunkKey, ...]  # what starts to come then: what is wanted now, and what is wanted next


def uses_of(actions: Sequence[Action], chunks: WeightChunks) -> list[tuple[int, tuple[ChunkKey, ...]]]:
    """(Place in the list, layers that are read at a time), in order; what is read twice in a row counts once."""
    found: list[tuple[int, tuple[ChunkKey, ...]]] = []
    orders = {FORWARD: chunks.forward, RECOMPUTE: chunks.forward}
    orders |= {BACKWARD: chunks.backward, BACKWARD_INPUT: chunks.backward}
    for place, action in enumerate(actions):
        for part in action.computations():
            for layers in orders[part.kind][part.stage] if part.kind in orders else ():
                wanted = tuple((part.stage, part.replica, layer) for layer in layers)
                if not found or found[-1][1] != wanted:
                    found.append((place, wanted))
    return found


def plan_chunks(program: Program, rank: int, actions: Sequence[Action]) -> list[ChunkUse]:
    """The plan of a rank's list. Raises ScheduleError where a layer has no room."""
    chunks = program.chunks
    assert chunks is not None
    uses, sizes = uses_of(actions, chunks), sizes_of(chunks, program.placement.num_replicas)
    wanted = [layers for _, layers in uses]
    least = least_room(wanted, sizes)
    room = least if chunks.capacity is None else chunks.capacity[rank]
    try:
        moves = moves_for(wanted, sizes, room)
    except ScheduleError as error:
        raise ScheduleError(f"pipeline rank {rank}: {error}") from None
    return [
        ChunkUse(place, layers, tuple(leave), tuple(come))
        for (place, layers), (leave, come) in zip(uses, moves, strict=True)
    ]


def sizes_of(chunks: WeightChunks, num_replicas: int = 1) -> dict[ChunkKey, int]:
    """Bytes of every layer's weights."""
    return {
        (stage, replica, layer): size
        for stage, sizes in enumerate(chunks.sizes)
        for layer, size in enumerate(sizes)
        for replica in range(num_replicas)
    }


def least_room(wanted: Sequence[Sequence[K]], sizes: Mapping[K, int]) -> int:
    """That of what is in use and of what is next."""
    pairs = zip(wanted, [*wanted[1:], ()], strict=True)
    return max((sum(sizes[key] for key in {*now, *then}) for now, then in pairs), default=0)


def moves_for(
    wanted: Sequence[Sequence[K]], sizes: Mapping[K, int], room: int, *, ahead: bool = True
) -> list[tuple[list[K], list[K]]]:
    """(What leaves, what comes) ahead of each use, with which what is there never takes more than `room`. For things of
    one size no other choice lets fewer come. ahead: what is wanted next comes already, if there is room for both.

    Raises ScheduleError where there is no room for what is wanted at a time.
    """
    next_uses: dict[K, deque[int]] = defaultdict(deque)
    for index, keys in enumerate(wanted):
        for key in keys:
            next_uses[key].append(index)
    there: dict[K, None] = {}
    held = 0
    moves: list[tuple[list[K], list[K]]] = []
    for index, keys in enumerate(wanted):
        for key in keys:
            next_uses[key].popleft()
        following = wanted[index + 1] if ahead and index + 1 < len(wanted) else ()
        if sum(sizes[key] for key in {*keys, *following}) > room:
            following = ()
        kept = dict.fromkeys((*keys, *following))
        come = [key for key in kept if key not in there]
        held += sum(sizes[key] for key in come)
        free = [key for key in reversed(there) if key not in kept] if held > room else []
        next_use = [next_uses[key][0] if next_uses[key] else inf for key in free]
        leave = [free[i] for i in belady(next_use, [sizes[key] for key in free], held=held, room=room)]
        for key in leave:
            del there[key]
        there |= dict.fromkeys(come)
        held = sum(sizes[key] for key in there)
        if held > room:
            needed = sum(sizes[key] for key in keys)
            raise ScheduleError(f"a layer's weights are {needed:,} bytes, and {room:,} have room; give more")
        moves.append((leave, come))
    return moves


def chunk_faults(plan: Sequence[ChunkUse], sizes: Mapping[ChunkKey, int], room: int) -> Iterator[tuple[int, str]]:
    """(Place in the rank's list, what is wrong there): something is read that is not on the device, comes or goes where
    it is not, or more is held than has room."""
    there: set[ChunkKey] = set()
    for use in plan:
        for key in use.leave:
            if key not in there:
                yield use.action, f"weights {_name(key)} leave the device, where they are not"
            there.discard(key)
        for key in use.come:
            if key in there:
                yield use.action, f"weights {_name(key)} come to the device, where they are"
            there.add(key)
        for key in use.wanted:
            if key not in there:
                yield use.action, f"weights {_name(key)} are read, and are on the host"
        held = sum(sizes[key] for key in there)
        if held > room:
            yield use.action, f"{held:,} bytes of weights are held, {room:,} have room"


def _name(key: ChunkKey) -> str:
    stage, replica, layer = key
    return f"of layer {layer} of stage {stage}" + (f".{replica}" if replica else "")


class ChunkTraffic(NamedTuple):
    """Of a rank's list of a batch."""

    peak: int  # most bytes of weights at once
    fetched: int  # bytes that come
    uses: int  # how many times a layer's weights are read
    transfers: int  # and come
    microbatches: int  # of the batch


@cache
def chunk_traffic(program: Program, rank: int, num_microbatches: int) -> ChunkTraffic:
    """Of a batch of so many micro-batches."""
    actions = program.order(rank, program.batch(0, last=True, size=num_microbatches))
    assert program.chunks is not None
    plan, sizes = plan_chunks(program, rank, actions), sizes_of(program.chunks, program.placement.num_replicas)
    held = peak = fetched = 0
    for use in plan:
        coming = sum(sizes[key] for key in use.come)
        held += coming - sum(sizes[key] for key in use.leave)
        peak, fetched = max(peak, held), fetched + coming
    uses, transfers = sum(len(use.wanted) for use in plan), sum(len(use.come) for use in plan)
    return ChunkTraffic(peak, fetched, uses, transfers, num_microbatches)


def with_chunks(program: Program, chunks: WeightChunks) -> Program:
    """The program with weights that come and go. Raises ScheduleError for an asynchronous one."""
    if program.asynchronous:
        raise ScheduleError(
            f"`param_offload`: {program.name} keeps two versions of the weights; use `pipeline_schedule`=1f1b"
        )
    return replace(program, chunks=chunks)
