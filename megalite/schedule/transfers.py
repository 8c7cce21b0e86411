"""Saved activations that wait on the host for their backward: which ones, and when they move.

    capacity 3     F0 F1 F2 F3 F4 B0 ...            a fourth does not fit
    moved          F0 F1 F2 EVICT1 F3 ...           the one whose backward is farthest away leaves ...
                   ... PREFETCH1 B0 B1 ...          ... and comes back one computation ahead of it

A program says when each micro-batch's activations are used again, so what to evict is known before the run
(`eviction.py`). An activation is made by F (or R), used by B or I, and needed by nobody in between: each one that is
evicted costs two transfers, and with activations of one size no other choice needs fewer.

A transfer runs beside one computation. What EVICT sends counts as on the device until the computation behind it has
ended, what PREFETCH brings from its beginning on; the capacity holds at every computation with that. So the link has
the time of one computation for each transfer before anybody waits.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megalite.errors import ScheduleError
from megalite.schedule.action import AWAITING_WEIGHT, EVICT, FORWARD, INPUT_GRADIENT_KINDS, PREFETCH, RECOMPUTE, Action
from megalite.schedule.eviction import belady
from megalite.schedule.program import ActivationRoom, BatchRange, Program

SavedKey = tuple[int, int, int]  # (stage, replica, micro-batch) of the activations that a forward keeps


@dataclass
class _Saved:
    """Activations from the computation that makes them to the one that uses them, as indices of computations."""

    key: SavedKey
    size: float
    made: int
    used: int = -1
    evicted: bool = False

    def held(self, index: int) -> bool:
        """Whether it counts as on the device during that computation, which is not its maker or the one behind it."""
        return not self.evicted or index >= self.used - 1


def insert_transfers(program: Program, room: ActivationRoom) -> Program:
    """EVICT and PREFETCH with which no rank holds more than its capacity; as few as possible where all are of a size.

    EVICT follows the computation that made the activations, PREFETCH stands one computation ahead of the one that uses
    them. Raises ScheduleError where they are not enough, and for an asynchronous program, whose activations outlive the
    batch.
    """
    if program.asynchronous:
        raise ScheduleError(
            f"`device_memory_budget_gb`: {program.name} never drains, and what it keeps outlives its batch; use "
            "`pipeline_schedule`=1f1b, or a larger budget"
        )

    def order(rank: int, batch: BatchRange) -> list[Action]:
        actions = program.order(rank, batch)
        evicted = plan(actions, program.recomputed, room, room.capacity[rank], f"pipeline rank {rank}")
        leave: dict[int, list[Action]] = {}
        come: dict[int, list[Action]] = {}
        for saved in evicted:
            stage, replica, microbatch = saved.key
            leave.setdefault(saved.made, []).append(Action(EVICT, stage, microbatch, replica=replica))
            come.setdefault(saved.used - 1, []).append(Action(PREFETCH, stage, microbatch, replica=replica))
        out: list[Action] = []
        index = 0
        for action in actions:
            if action.is_compute:
                out += [*come.get(index, []), action, *leave.get(index, [])]
                index += 1
            else:
                out.append(action)
        return out

    return replace(program.with_order(order), room=room)


def plan(
    actions: Sequence[Action], recomputed: frozenset[int], room: ActivationRoom, capacity: float, who: str
) -> list[_Saved]:
    """What is evicted of a rank's list. Raises ScheduleError where all of it is not enough."""
    everything, waiting = _lives(actions, recomputed, room)
    ahead = deque(everything)
    there: list[_Saved] = []
    for index, base in enumerate(waiting):
        there = [saved for saved in there if saved.used >= index]
        while ahead and ahead[0].made == index:
            there.append(ahead.popleft())
        now = base + sum(saved.size for saved in there if saved.held(index))
        if now <= capacity:
            continue
        free = [saved for saved in there if not saved.evicted and saved.made + 1 < index < saved.used - 1]
        free = sorted(reversed(free), key=lambda saved: saved.size, reverse=True)  # of equal next uses the largest
        sizes = [saved.size for saved in free]
        for position in belady([saved.used for saved in free], sizes, held=now, room=capacity):
            free[position].evicted = True
            now -= free[position].size
        if now > capacity:
            raise ScheduleError(
                f"`device_memory_budget_gb`: {who} holds {float(now):,g} of activations at once, with what is on "
                f"its way to and from the host, and has room for {float(capacity):,g}; raise it"
            )
    return [saved for saved in everything if saved.evicted]


def _lives(
    actions: Sequence[Action], recomputed: frozenset[int], room: ActivationRoom
) -> tuple[list[_Saved], list[float]]:
    """(All activations of a list in the order in which they are made, bytes that wait for W at each computation)."""
    found: dict[SavedKey, _Saved] = {}
    waiting: list[float] = []
    now = 0.0
    for index, action in enumerate(action for action in actions if action.is_compute):
        waiting.append(now)
        for part in action.computations():
            key = (part.stage, part.replica, part.microbatch)
            if makes(part, recomputed):
                found[key] = _Saved(key, room.full[part.stage], index)
            elif part.kind in INPUT_GRADIENT_KINDS:
                found[key].used = index
            now += AWAITING_WEIGHT.get(part.kind, 0) * room.weight_only[part.stage]
    return list(found.values()), waiting


def makes(part: Action, recomputed: frozenset[int]) -> bool:
    """Whether a computation makes the activations that a backward uses."""
    return part.kind == (RECOMPUTE if part.stage in recomputed else FORWARD)


def transfer_faults(
    actions: Sequence[Action], recomputed: frozenset[int], room: ActivationRoom, capacity: float
) -> Iterator[tuple[int, str]]:
    """(Position in a rank's list, what is wrong there): something is used that is on the host, moved from where it is
    not, or more is held than has room."""
    for position, _, _, wrong in _walk(actions, recomputed, room):
        if wrong:
            yield position, wrong
    for position, device, _, _ in _walk(actions, recomputed, room):
        if device > capacity:
            wrong = f"{float(device):,g} of activations are held, {float(capacity):,g} have room"
            yield position, f"{actions[position]}: {wrong}"


class Residency(NamedTuple):
    """Of a rank's list: the most bytes of activations on the device and on the host, and how many times some moved."""

    device: float
    host: float
    transfers: int


def residency(actions: Sequence[Action], recomputed: frozenset[int], room: ActivationRoom) -> Residency:
    """What a rank's list does."""
    device = host = 0.0
    for _, there, away, _ in _walk(actions, recomputed, room):
        device, host = max(device, there), max(host, away)
    return Residency(device, host, sum(action.kind in (EVICT, PREFETCH) for action in actions))


def _walk(
    actions: Sequence[Action], recomputed: frozenset[int], room: ActivationRoom
) -> Iterator[tuple[int, float, float, str]]:
    """(Position, bytes on the device, bytes on the host, what is wrong) of every computation and fault."""
    device: dict[SavedKey, float] = {}
    leaving: dict[SavedKey, float] = {}
    host: dict[SavedKey, float] = {}
    waiting = 0.0
    for position, action in enumerate(actions):
        key = (action.stage, action.replica, action.microbatch)
        if action.kind == EVICT:
            if key not in device:
                yield position, 0.0, 0.0, f"{action}: its activations are not on the device"
            leaving[key] = device.pop(key, 0.0)
        elif action.kind == PREFETCH:
            if key not in host:
                yield position, 0.0, 0.0, f"{action}: its activations are not on the host"
            host.pop(key, None)
            device[key] = room.full[action.stage]
        if not action.is_compute:
            continue
        done: list[SavedKey] = []
        for part in action.computations():
            here = (part.stage, part.replica, part.microbatch)
            if makes(part, recomputed):
                device[here] = room.full[part.stage]
            elif part.kind in INPUT_GRADIENT_KINDS:
                if here not in device:
                    yield position, 0.0, 0.0, f"{part}: its activations are on the host"
                done.append(here)
        gone = sum(leaving.values())
        yield position, waiting + sum(device.values()) + gone, sum(host.values()) + gone, ""
        host |= leaving
        leaving.clear()
        for here in done:
            device.pop(here, None)
        for part in action.computations():
            waiting += AWAITING_WEIGHT.get(part.kind, 0) * room.weight_only[part.stage]
