"""Check 4: the memory of a rank's device, allocation by allocation, in the order of its whole batch.

A short batch was rehearsed. What an action allocates and frees for one micro-batch it does for every other: the actions
of the whole program are replayed with what was seen of the first micro-batch, of one that repeats, and of the last.
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalite.inventory import lowered_program, stage_layer_ranges
from megalite.planner import PlannedStages, RankMemory, pipeline_memory, within_budget
from megalite.rehearsal.allocator import Allocator
from megalite.rehearsal.classes import mesh_of
from megalite.rehearsal.match import Fault, Records
from megalite.rehearsal.order import Event
from megalite.rehearsal.rank import Rehearsed
from megalite.rehearsal.record import RankRecord
from megalite.rehearsal.short import WHOLE
from megalite.schedule import Action, BatchRange, Program

ROUNDS = 2
"""Times the pipeline's length, the micro-batches after which no more activations are alive than before."""
TOLD = 20
WORTH = 256 << 20
"""Bytes below which a difference from the plan is not told."""
APART, TORN = 0.10, 1.3
A_PAIR = 2 * (4 << 20)
"""Bytes that NCCL keeps for messages in one direction between two ranks: two channels, NCCL_BUFFSIZE each."""
NUMBER = re.compile(r" (?:mb|update |batch )(\d+)")


@dataclass(frozen=True)
class Found:
    """Bytes of one rank. allocated, reserved: at most. states: what is there from step to step. at_peak: (place, bytes)
    of what is alive when most is, the largest first. kept: (place, bytes) of what each iteration leaves behind.
    last_segment: where the allocator asked the device for more at last. pairs: where a message first goes from or to
    another rank, each of which costs NCCL buffers. planned: of balanced experts."""

    rank: int
    allocated: int
    reserved: int
    states: int
    at_peak: Sequence[tuple[str, int]]
    kept: Sequence[tuple[str, int]]
    planned: RankMemory | None
    last_segment: str
    pairs: Sequence[str]


def memory(run: Rehearsed, records: Records) -> list[Found]:
    """Of each rehearsed rank."""
    config = run.full
    plan = within_budget(config, run.size, on_cpu=False)
    whole = lowered_program(config, config.num_microbatches(run.size), plan=plan)
    planned: Sequence[RankMemory | None] = [None] * whole.num_ranks  # of a module that the planner does not know
    if not config.model.is_foreign:
        cuts, even = stage_layer_ranges(config, whole), replace(config.model.experts, moe_expert_capacity_factor=1.0)
        balanced = replace(config, model=replace(config.model, experts=even))  # as `values.py` has it
        planned = pipeline_memory(PlannedStages(balanced, run.size, whole, cuts, plan))
    rounds = max(ROUNDS, -(-WHOLE // whole.num_ranks))
    program = lowered_program(config, min(whole.num_microbatches, rounds * whole.num_ranks), plan=plan)
    stages = {rank: mesh_of(run, rank).coordinate("pp") for rank in records}
    return [of_log(r, events(run, r, program, stages[rank]), planned[stages[rank]]) for rank, r in records.items()]


def of_log(record: RankRecord, log: Iterable[Event], planned: RankMemory | None) -> Found:
    """What a log of allocations comes to."""
    allocator = Allocator()
    alive: dict[object, tuple[int, str, int]] = {}
    peak: dict[str, int] = {}
    highest, grown, iterations = 0.0, "", 0
    ends: list[dict[object, tuple[int, str, int]]] = []
    for kind, number, nbytes, stream, place in log:
        if kind == "alloc":
            alive[number] = nbytes, place, len(ends)
            before = allocator.reserved
            most = allocator.alloc(number, nbytes, stream)
            grown = place if allocator.reserved > before else grown
            if most and allocator.allocated > highest:
                highest = allocator.allocated * 1.001  # the sums below cost more
                peak = _by_place(alive.values())
        elif kind == "free":
            alive.pop(number, None)
            allocator.free(number)
        elif kind == "phase" and (place.startswith("iteration") or ends):
            ends.append(dict(alive))
            iterations += place.startswith("iteration")
    states = sum(size for size, _, _ in ends[-1].values()) if ends else 0
    last = min(iterations, 3)  # the third captures no graphs any more
    ended = ends[last].values() if len(ends) > last > 1 else ()
    left = [_by_place(each for each in ended if each[2] == n) for n in range(1, last + 1)]
    kept = [(place, size) for place, size in left[-1].items() if place and all(place in each for each in left)]
    pairs = {(c.communicator, c.peer, c.kind): c.place for c in reversed(record.calls) if c.peer is not None}
    largest = sorted(peak.items(), key=lambda each: -each[1])[:TOLD]
    peaks = allocator.peak_allocated, allocator.peak_reserved
    return Found(record.rank, *peaks, states, largest, kept, planned, grown, [*pairs.values()])


def _by_place(alive: Iterable[tuple[int, str, int]]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for size, place, _ in alive:
        found[place] += size
    return found


# ---- the whole batch -------------------------------------------------------------------------------------------------

Instance = tuple[str, int]
"""(What an action does, for which micro-batch)"""


def events(run: Rehearsed, record: RankRecord, program: Program, stage: int) -> Iterator[Event]:
    """What the rank's allocator is asked for, with the last iteration's batch at its whole length."""
    if run.full.num_microbatches(run.size) <= WHOLE or program.asynchronous or program.update_per_microbatch:
        yield from record.log
        return
    begin = max(i for i, event in enumerate(record.log) if event[0] == "phase" and event[4] == f"iteration {run.steps}")
    end = next((i for i, event in enumerate(record.log) if i > begin and event[0] == "phase"), len(record.log))
    yield from record.log[:begin]
    head, parts = _cut(record.log[begin:end])
    yield from head
    yield from _replayed(parts, [_instance(action.words) for action in planned_actions(program, stage)])
    yield from record.log[end:]


def planned_actions(program: Program, stage: int) -> Iterator[Action]:
    batch = BatchRange(0, 0, program.num_microbatches, 0, True)
    for action in program.actions_for_batch(stage, batch):
        yield from action.parts or (action,)


def _instance(words: str) -> Instance:
    number = NUMBER.search(words)
    return NUMBER.sub("", words), int(number[1]) if number else 0


def _cut(log: Sequence[Event]) -> tuple[list[Event], list[tuple[Instance, list[Event]]]]:
    """(What comes before the first action, each action's events with those that follow it)."""
    head: list[Event] = []
    parts: list[tuple[Instance, list[Event]]] = []
    for event in log:
        if event[0] == "action" and event[4]:
            parts.append((_instance(event[4]), []))
        elif event[0] in ("alloc", "free", "phase"):
            (parts[-1][1] if parts else head).append(event)
    return head, parts


def _replayed(parts: list[tuple[Instance, list[Event]]], program: Sequence[Instance]) -> Iterator[Event]:
    """The actions of `program`, each as it was seen: what one of them leaves behind is told by its line and turn."""
    seen: dict[str, list[tuple[int, list[tuple[Event, Any]]]]] = defaultdict(list)
    owner: dict[int, tuple[str, int, object]] = {}
    for (does, number), inside in parts:
        gone, left, told = {event[1] for event in inside if event[0] == "free"}, Counter[str](), []
        for index, event in enumerate(inside):
            if event[0] == "alloc":
                left[event[4]] += event[1] not in gone
                at = index if event[1] in gone else (event[4], left[event[4]])
                owner[event[1]] = does, number, at
            told.append((event, owner.get(event[1])))
        seen[does].append((number, told))
    totals, counts = Counter(does for does, _ in program), Counter[str]()
    alive: dict[tuple[str, object], dict[int, int]] = defaultdict(dict)
    fresh = -1
    for does, number in program:
        counts[does] += 1
        if not (known := seen.get(does)):
            continue
        # What repeats is the one that frees most of what others have left: near the end of a pipeline only the last
        # forward comes after a backward.
        steady = max(known[1:] or known, key=lambda each: sum(e[0] == "free" for e, _ in each[1]))
        recorded, told = known[0] if counts[does] == 1 else known[-1] if counts[does] == totals[does] else steady
        for (kind, memory, nbytes, stream, place), made in told:
            if made is None:
                yield kind, memory, nbytes, stream, place
            elif kind == "alloc":
                alive[made[0], made[2]][number] = fresh
                yield kind, fresh, nbytes, stream, place
                fresh -= 1
            else:
                there = alive[made[0], made[2]]
                mine = number if made[1] == recorded else next(iter(there), None)
                if mine in there:
                    yield kind, there.pop(mine), 0, 0, ""


# ---- what is told ----------------------------------------------------------------------------------------------------


def memory_faults(found: Sequence[Found], device_bytes: float | None) -> Iterator[Fault]:
    """device_bytes: what a run may use of the device; None: it is not known."""
    for each in found:
        who, room = f"rank {each.rank}", sys.maxsize if device_bytes is None else device_bytes
        if each.kept:
            place, size = max(each.kept, key=lambda one: one[1])
            total = sum(size for _, size in each.kept)
            text = f"{who}: every iteration leaves {size:,} bytes ({total:,} in all) alive, allocated at {place}"
            yield Fault("memory", f"{text}\n    let go of them: something still holds a tensor of the step")
        if each.reserved > room:
            largest = "".join(f"\n    {size / 2**30:8.2f} GiB {place}" for place, size in each.at_peak[:5])
            text = f"{who} needs {each.reserved / 2**30:.1f} GiB, {room / 2**30:.1f} are there; at its peak:{largest}"
            yield Fault("memory", f"{text}\n    tools/plan.py --free all looks for a layout that fits")
        if each.reserved > TORN * each.allocated and each.allocated > WORTH:
            text = f"{who} reserves {each.reserved / 2**30:.1f} GiB for {each.allocated / 2**30:.1f} that are allocated"
            text += f"; the last segment is for {each.last_segment}"
            yield Fault("memory", f"{text}\n    PYTORCH_ALLOC_CONF=expandable_segments:True", warns=True)
        buffers = len(each.pairs) * A_PAIR
        if each.reserved <= room < each.reserved + buffers:
            text = f"{who} needs {each.reserved / 2**30:.2f} GiB, and NCCL {buffers / 2**30:.2f} for messages that it"
            text += f" exchanges with others in {len(each.pairs)} directions; {room / 2**30:.2f} are there"
            yield Fault("memory", f"{text}; the last of them at {each.pairs[0]}\n    send to fewer ranks, or gather")
        yield from _unplanned(each, who)


def _unplanned(found: Found, who: str) -> Iterator[Fault]:
    plan, has = found.planned, found.allocated
    if plan is None or abs(has - plan.total) <= max(APART * plan.total, WORTH):
        return
    rest, planned_rest = has - found.states, plan.total - plan.model_states
    of_states = abs(found.states - plan.model_states) > abs(rest - planned_rest)
    term = "weights, gradients and optimizer" if of_states else "activations and buffers"
    largest = f"; the largest at {found.at_peak[0][0]}" if found.at_peak else ""
    text = f"{who} allocates {has / 2**30:.2f} GiB, the plan says {plan.total / 2**30:.2f}: {term} differ"
    states = f"states {found.states / 2**30:.2f} of {plan.model_states / 2**30:.2f}"
    others = f"others {rest / 2**30:.2f} of {planned_rest / 2**30:.2f}"
    yield Fault("memory", f"{text} ({states}, {others}){largest}", warns=True)
