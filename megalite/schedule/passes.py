"""Passes: from the computations that a generator writes to the list that an executor runs.

    merge_backward       I(k) W(k) side by side -> B(k)
    insert_reduce        REDUCE after a stage's last weight gradient of an update
    insert_unshard       UNSHARD before, RESHARD after each run of actions of one stage (ZeRO-3)
    insert_communication SEND right after the producer, RECV one computation ahead of its user
    lower                all of them, in this order

Each takes a Program and returns a Program; both can be drawn, proved and priced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megalite.errors import ScheduleError
from megalite.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    GRADIENT_KINDS,
    RECV_B,
    RECV_F,
    REDUCE,
    RESHARD,
    SEND_B,
    SEND_F,
    STEP,
    UNSHARD,
    Action,
)
from megalite.schedule.program import BatchRange, Program
from megalite.schedule.stage_placement import StagePlacement


def lower(program: Program, *, unshard: bool = False) -> Program:
    """Everything an executor needs. unshard: gather each stage's weights when needed (ZeRO-3) and free them after."""
    program = insert_reduce(merge_backward(program))
    return insert_communication(insert_unshard(program) if unshard else program)


def merge_backward(program: Program) -> Program:
    """An input gradient directly followed by the weight gradient of the same micro-batch is an ordinary backward."""

    def order(rank: int, batch: BatchRange) -> list[Action]:
        merged: list[Action] = []
        for action in program.order(rank, batch):
            before = merged[-1] if merged else None
            if (
                before is not None
                and action.kind == BACKWARD_WEIGHT
                and before.kind == BACKWARD_INPUT
                and (before.stage_key, before.microbatch) == (action.stage_key, action.microbatch)
            ):
                merged[-1] = before._replace(kind=BACKWARD)
            else:
                merged.append(action)
        return merged

    return program.with_order(order)


def insert_reduce(program: Program) -> Program:
    """REDUCE u directly after the last B or W of update u on each stage: reduction overlaps whatever follows."""

    def order(rank: int, batch: BatchRange) -> list[Action]:
        actions = program.order(rank, batch)
        last: dict[tuple[int, int, int], int] = {}
        for position, action in enumerate(actions):
            for part in action.computations():
                update = program.update_of(part.microbatch, batch)
                # Backwards of batch t + 1 before STEP t: its reduction waits for its last one, here or in the next
                # iteration.
                whole = part.microbatch < batch.end or part.microbatch == batch.following.end - 1
                if part.kind in GRADIENT_KINDS and whole:
                    last[part.stage, part.replica, update] = position
        after: dict[int, list[Action]] = {}
        for (stage, replica, update), position in last.items():
            after.setdefault(position, []).append(Action(REDUCE, stage, update, replica=replica))
        return [item for position, action in enumerate(actions) for item in (action, *after.get(position, ()))]

    return program.with_order(order)


def insert_unshard(program: Program) -> Program:
    """UNSHARD one run ahead, so that the gather overlaps; RESHARD where the next two runs do not need the stage.

    A run is a maximal sequence of computations of one stage. In breadth-first order that is one gather per chunk and
    direction, and at most two chunks gathered at a time; with one chunk per rank it is one gather per batch. Raises
    ScheduleError for an asynchronous program, which would need several versions gathered at once.
    """
    if program.asynchronous:
        raise ScheduleError(
            f"--zero-stage=3: {program.name} computes on several weight versions, and each would have to be gathered; "
            "use --zero-stage=1, or --pipeline-schedule=1f1b"
        )

    def order(rank: int, batch: BatchRange) -> list[Action]:
        actions = program.order(rank, batch)
        runs: list[tuple[int, set[tuple[int, int]]]] = []
        for position, action in enumerate(actions):
            if action.is_compute:
                stages = {part.stage_key for part in action.computations()}
                if not runs or runs[-1][1] != stages:
                    runs.append((position, stages))
        starts = {position: index for index, (position, _) in enumerate(runs)}
        out: list[Action] = []
        gathered: set[tuple[int, int]] = set()

        def needed(index: int) -> set[tuple[int, int]]:
            return set().union(*(stages for _, stages in runs[index : index + 2]))

        def change(wanted: set[tuple[int, int]], current: set[tuple[int, int]]) -> None:
            out.extend(Action(RESHARD, s, batch.iteration, replica=x) for s, x in sorted(gathered - wanted))
            out.extend(
                Action(UNSHARD, s, batch.iteration, replica=x)
                for s, x in sorted(wanted - gathered, key=lambda stage: (stage not in current, stage))
            )
            gathered.clear()
            gathered.update(wanted)

        for position, action in enumerate(actions):
            if position in starts:
                change(needed(starts[position]), runs[starts[position]][1])
            elif action.kind == STEP and position > runs[-1][0]:
                change(set(), set())
            out.append(action)
        return out

    return program.with_order(order)


@dataclass(frozen=True)
class _Message:
    """A tensor that crosses a wire: the RECV that takes it, at its user's place."""

    recv: Action
    position: int
    """Index, among the computations of the receiving rank, of the one before which the RECV stands."""
    rank_in_user_order: int


def receives(action: Action, placement: StagePlacement) -> Iterator[Action]:
    """The messages that a computation needs from other ranks."""
    wires = {FORWARD: (RECV_F, -1), BACKWARD: (RECV_B, 1), BACKWARD_INPUT: (RECV_B, 1)}
    return _messages(action, placement, wires)


def sends(action: Action, placement: StagePlacement) -> Iterator[Action]:
    """The messages that a computation produces for other ranks."""
    wires = {FORWARD: (SEND_F, 1), BACKWARD: (SEND_B, -1), BACKWARD_INPUT: (SEND_B, -1)}
    return _messages(action, placement, wires)


def _messages(action: Action, placement: StagePlacement, wires: Mapping[str, tuple[str, int]]) -> Iterator[Action]:
    """wires: kind of a computation -> kind of its message, and how many stages further the other end is."""
    for part in action.computations():
        kind, distance = wires.get(part.kind, ("", 0))
        if kind and 0 <= part.stage + distance < placement.num_stages:
            peer = placement.rank_of(part.stage + distance, part.replica)
            # Chunks of one rank hand tensors over in memory (the turning point of a V, or p = 1).
            if peer != placement.rank_of(part.stage, part.replica):
                yield Action(kind, part.stage, part.microbatch, peer=peer, replica=part.replica)


def matching_recv(send: Action, sender: int) -> Action:
    """The RECV at the other end of a SEND that `sender` issues."""
    if send.kind == SEND_F:
        return Action(RECV_F, send.stage + 1, send.microbatch, peer=sender, replica=send.replica)
    return Action(RECV_B, send.stage - 1, send.microbatch, peer=sender, replica=send.replica)


def insert_communication(program: Program) -> Program:
    """SEND directly after the computation that produced the tensor; RECV posted early, in the order of the *sender*.

    Point-to-point transports match messages by order, not by name: on every directed pair of ranks the receives must
    be posted in the same order as the sends. So the sender's order places them; each is posted one computation before
    its user, or earlier if a message behind it on the same wire is needed earlier:

        the sender sends    a b c        the receiver computes    x  U(a)  U(c)  y  U(b)
        one ahead of its user            RECV a before x, RECV c before U(a), RECV b before y
        in the order of the sends        RECV a before x, RECV b and RECV c before U(a)

    Neither rule looks at durations, so the result is one fixed list. In an asynchronous program the receive for the
    first computation of iteration t + 1 is posted in iteration t.
    """
    placement = program.placement

    def carried(rank: int, batch: BatchRange) -> list[Action]:
        """Receives of the first computation of a warm iteration, which the iteration before has posted."""
        going_on = batch._replace(next_size=batch.size, first=False)
        head = next((action for action in program.order(rank, going_on) if action.is_compute), None)
        # Only if it exists whether or not `batch` is the last: the iteration before cannot know that.
        return [recv for recv in receives(head, placement) if recv.microbatch < batch.end] if head else []

    def order(rank: int, batch: BatchRange) -> list[Action]:
        actions = program.order(rank, batch)
        posted = set() if batch.first or not program.asynchronous else set(carried(rank, batch))
        computations = [action for action in actions if action.is_compute]
        wanted: list[_Message] = []
        for index, action in enumerate(computations):
            for recv in receives(action, placement):
                if recv not in posted:
                    wanted.append(_Message(recv, max(index - 1, 0), len(wanted)))
        if program.asynchronous and batch.next_size:
            for recv in carried(rank, batch.following):
                wanted.append(_Message(recv, max(len(computations) - 1, 0), len(wanted)))
        before = _place_receives(program, rank, batch, wanted)
        out: list[Action] = []
        index = 0
        for action in actions:
            if action.is_compute:
                out += before.get(index, [])
                out.append(action)
                out += sends(action, placement)
                index += 1
            else:
                out.append(action)
        return out if index else out + before.get(0, [])

    return replace(program, order=order, has_communication=True)


def _place_receives(program: Program, rank: int, batch: BatchRange, wanted: list[_Message]) -> dict[int, list[Action]]:
    """Computation index -> receives to post before it, such that each source's messages keep their sender's order."""
    placed: list[tuple[int, int, Action]] = []
    for source in sorted({message.recv.peer for message in wanted}):
        messages = [message for message in wanted if message.recv.peer == source]
        if program.asynchronous:
            # A message may be sent in the iteration before; on each wire the order is that of the micro-batches.
            messages.sort(key=lambda message: message.recv.microbatch)
        else:
            sent = (send for action in program.order(source, batch) for send in sends(action, program.placement))
            place = {matching_recv(send, source): number for number, send in enumerate(sent) if send.peer == rank}
            # What is never sent (a file may forget a computation) waits at the end: the validator names it.
            messages.sort(key=lambda message: place.get(message.recv, len(place)))
        position, turn = messages[-1].position, messages[-1].rank_in_user_order
        for message in reversed(messages):
            position, turn = min((position, turn), (message.position, message.rank_in_user_order))
            placed.append((position, turn, message.recv))
    # Stable sort after the reversal: equal (position, turn) means "pulled forward by the same later message".
    before: dict[int, list[Action]] = {}
    for position, _, recv in sorted(reversed(placed), key=lambda item: item[:2]):
        before.setdefault(position, []).append(recv)
    return before
