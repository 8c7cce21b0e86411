"""Passes: from the computations that a schedule writes down to the complete list of actions that a rank executes.

A schedule says in which order each rank computes (F, B, I, W) and when it steps. Everything else follows from that, and
`lower` adds it:

    merge_backward          I(k) directly followed by W(k) becomes B(k)
    insert_reduce           REDUCE as soon as the gradient of a stage is complete
    insert_communication    SEND after the computation that makes a tensor, RECV ahead of the one that needs it

and where a run asks for it

    insert_unshard          UNSHARD and RESHARD around the use of a stage's weights (ZeRO-3)
    delay_update            every batch on weights that lack the update of the batch before it

Both ranks of 1F1B with two micro-batches, as the schedule writes them and after `lower` (stage numbers left out):

    rank 0    F0 F1 B0 B1 STEP0
              F0 SEND_F0>1 RECV_B0<1 F1 SEND_F1>1 RECV_B1<1 B0 B1 REDUCE0 STEP0
    rank 1    F0 B0 F1 B1 STEP0
              RECV_F0<0 F0 RECV_F1<0 B0 SEND_B0>0 F1 B1 SEND_B1>0 REDUCE0 STEP0

Each pass takes a Program and returns a Program, so its result can be drawn, proved and priced like any other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from megalite.errors import ScheduleError
from megalite.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    GRADIENT_KINDS,
    NONE,
    RECV_B,
    RECV_F,
    REDUCE,
    RESHARD,
    SEND_B,
    SEND_F,
    STEP,
    UNSHARD,
    Action,
    StageKey,
)
from megalite.schedule.program import BatchRange, Program
from megalite.schedule.stage_placement import StagePlacement


def lower(program: Program) -> Program:
    """What every schedule needs, in this order."""
    return insert_communication(insert_reduce(merge_backward(program)))


def merge_backward(program: Program) -> Program:
    """I(k) directly followed by W(k) on one stage is an ordinary backward, B(k), which is cheaper."""

    def order(rank: int, batch: BatchRange) -> list[Action]:
        merged: list[Action] = []
        for action in program.order(rank, batch):
            if merged and merged[-1].kind == BACKWARD_INPUT and action == merged[-1]._replace(kind=BACKWARD_WEIGHT):
                merged[-1] = action._replace(kind=BACKWARD)
            else:
                merged.append(action)
        return merged

    return program.with_order(order)


def delay_update(program: Program) -> Program:
    """`--delayed-parameter-update`: the same order of computations on weights one update older, as docs/memory.md draws
    it (ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840).

    It is PipeDream-2BW's rule, for any schedule that flushes: two weight versions, gradients one update old. STEP t
    stays where it was, at the end of batch t; what it writes is first read by batch t + 2, so a step on the host has
    the whole of batch t + 1 to finish. Raises ScheduleError unless the program flushes.
    """
    if program.asynchronous or program.rounds is not None:
        raise ScheduleError(f"`delayed_parameter_update`: {program.name} has no flush after every batch")

    def order(rank: int, batch: BatchRange) -> list[Action]:
        return [_older(action) for action in program.order(rank, batch)]

    versions, staleness = (2,) * program.num_ranks, (1,) * program.num_stages
    return replace(program, order=order, weight_versions=versions, staleness=staleness)


def _older(action: Action) -> Action:
    if action.parts:
        return action._replace(parts=tuple(_older(part) for part in action.parts))
    return action if action.version == NONE else action._replace(version=max(action.version - 1, 0))


def insert_reduce(program: Program) -> Program:
    """REDUCE u directly after the last B or W of update u on each stage: the reduction overlaps what follows.

        F1 B0 B1 STEP0    ->    F1 B0 B1 REDUCE0 STEP0

    An asynchronous program runs some backwards of batch t + 1 before STEP t. REDUCE t + 1 follows in the iteration that
    holds the last of them, which may be this one or the next.
    """

    def order(rank: int, batch: BatchRange) -> list[Action]:
        actions, turns = program.order(rank, batch), program.placement.turn_of(rank)[1]
        last: dict[tuple[int, int, int], int] = {}
        for position, action in enumerate(actions):
            for part in action.computations():
                completed_here = part.microbatch < batch.end or part.microbatch + turns >= batch.following.end
                if part.kind in GRADIENT_KINDS and completed_here:
                    last[part.stage, part.replica, program.update_of(part.microbatch, batch)] = position
        after: dict[int, list[Action]] = {}
        for (stage, replica, update), position in last.items():
            after.setdefault(position, []).append(Action(REDUCE, stage, update, replica=replica))
        return [item for position, action in enumerate(actions) for item in (action, *after.get(position, ()))]

    return program.with_order(order)


def insert_unshard(program: Program) -> Program:
    """UNSHARD ahead of use, so that the gather overlaps computation; RESHARD once the weights are not needed soon.

    A rank's computations fall into runs of the same stage. When a run begins, the weights of that run and of the next
    one are gathered, and all others are freed. Rank 0 of the breadth-first schedule holds stages 0 and 2 of four; with
    two micro-batches:

        runs        |                 0F0 0F1 | 2F0 2F1 2B0 2B1 |          0B0 0B1 |
        gathered    | 0UNSHARD 2UNSHARD       | (0 and 2 stay)  | 2RESHARD         | 0RESHARD

    So at most two stages are gathered at a time. Breadth-first needs one gather per stage and direction, a schedule
    with one stage per rank needs one per batch. Raises ScheduleError for an asynchronous program, which would need
    several versions of the weights gathered at once.
    """
    if program.asynchronous:
        raise ScheduleError(
            f"`zero_stage`=3: {program.name} computes on several weight versions, and each would have to be gathered; "
            "use `zero_stage`=1, or `pipeline_schedule`=1f1b"
        )

    def order(rank: int, batch: BatchRange) -> list[Action]:
        actions = program.order(rank, batch)
        runs = _runs(actions)
        run_at = {position: index for index, (position, _) in enumerate(runs)}
        out: list[Action] = []
        gathered: set[StageKey] = set()

        def gather_only(wanted: set[StageKey], first: set[StageKey]) -> None:
            """Frees what is not wanted and gathers what is, `first` before the others."""
            free = sorted(gathered - wanted)
            bring = sorted(wanted - gathered, key=lambda stage: (stage not in first, stage))
            out.extend(Action(RESHARD, stage, batch.iteration, replica=replica) for stage, replica in free)
            out.extend(Action(UNSHARD, stage, batch.iteration, replica=replica) for stage, replica in bring)
            gathered.clear()
            gathered.update(wanted)

        for position, action in enumerate(actions):
            if position in run_at:
                index = run_at[position]
                this_and_next = [stages for _, stages in runs[index : index + 2]]
                gather_only(set().union(*this_and_next), first=this_and_next[0])
            elif action.kind == STEP and position > runs[-1][0]:
                gather_only(set(), first=set())
            out.append(action)
        return out

    return program.with_order(order)


def _runs(actions: Sequence[Action]) -> list[tuple[int, set[StageKey]]]:
    """(Position of the first action, stages) of each maximal sequence of computations on the same stages."""
    runs: list[tuple[int, set[StageKey]]] = []
    for position, action in enumerate(actions):
        if action.is_compute:
            stages = {part.stage_key for part in action.computations()}
            if not runs or runs[-1][1] != stages:
                runs.append((position, stages))
    return runs


def receives(action: Action, placement: StagePlacement) -> list[Action]:
    """The messages that a computation needs from other ranks."""
    return _messages(action, placement, {FORWARD: (RECV_F, -1), BACKWARD: (RECV_B, 1), BACKWARD_INPUT: (RECV_B, 1)})


def sends(action: Action, placement: StagePlacement) -> list[Action]:
    """The messages that a computation produces for other ranks."""
    return _messages(action, placement, {FORWARD: (SEND_F, 1), BACKWARD: (SEND_B, -1), BACKWARD_INPUT: (SEND_B, -1)})


def _messages(action: Action, placement: StagePlacement, message_of: Mapping[str, tuple[str, int]]) -> list[Action]:
    """message_of: kind of a computation -> kind of its message, and from its stage to the one at the other end."""
    found = []
    for part in action.computations():
        kind, distance = message_of.get(part.kind, ("", 0))
        if kind and 0 <= part.stage + distance < placement.num_stages:
            peer = placement.rank_of(part.stage + distance, part.replica, part.microbatch)
            # Stages of one rank hand tensors over in memory (the turning point of a V, or p = 1).
            if peer != placement.rank_of(part.stage, part.replica, part.microbatch):
                found.append(Action(kind, part.stage, part.microbatch, peer=peer, replica=part.replica))
    return found


def matching_recv(send: Action, sender: int) -> Action:
    """The RECV at the other end of a SEND that `sender` issues."""
    kind, stage = (RECV_F, send.stage + 1) if send.kind == SEND_F else (RECV_B, send.stage - 1)
    return Action(kind, stage, send.microbatch, peer=sender, replica=send.replica)


Due = tuple[int, int]
"""Of a receive: index of the computation before which it is best posted, and its number among all of the iteration."""


def insert_communication(program: Program, *, ahead: int = 1) -> Program:
    """SEND directly after the computation that made the tensor; RECV `ahead` computations before the one that needs it.

    Transports match messages by order, not by name: from one rank to another, receives must be posted in the order of
    the sends. So a receive is posted even earlier where a message that is sent after it is needed first. Say a rank
    computes X, then C, which needs message c, then B, which needs b, and the other rank sends b before c:

        one ahead of its user                        RECV c  X           RECV b  C  B
        in the order in which they are sent          RECV b  RECV c  X           C  B

    Neither rule looks at durations, so the result is one fixed list. In an asynchronous program the receive for the
    first computation of iteration t + 1 is posted in iteration t.
    """
    placement, silent = program.placement, program.order
    program = program.with_order(lru_cache(maxsize=16)(program.order))  # asked for by a rank and by its neighbours

    @lru_cache(maxsize=16)
    def sent(rank: int, batch: BatchRange) -> list[list[Action]]:  # by each action of a rank
        return [sends(action, placement) for action in program.order(rank, batch)]

    def posted_before(rank: int, batch: BatchRange) -> list[Action]:
        """The receives of the first computation of `batch`, if the iteration before is to post them."""
        continued = batch._replace(next_size=batch.size, first=False)
        head = next((action for action in program.order(rank, continued) if action.is_compute), None)
        # Only what is computed whether or not `batch` is the last one: the iteration before cannot know that.
        return [recv for recv in receives(head, placement) if recv.microbatch < batch.end] if head else []

    def order(rank: int, batch: BatchRange) -> list[Action]:
        actions = program.order(rank, batch)
        already = set() if batch.first or not program.asynchronous else set(posted_before(rank, batch))
        computations = [action for action in actions if action.is_compute]
        needed = [
            (index, recv)
            for index, action in enumerate(computations)
            for recv in receives(action, placement)
            if recv not in already
        ]
        if program.asynchronous and batch.next_size:
            needed += [(len(computations), recv) for recv in posted_before(rank, batch.following)]
        wanted = [(recv, (max(user - ahead, 0), number)) for number, (user, recv) in enumerate(needed)]
        before = _place_receives(rank, wanted, partial(sent, batch=batch), in_turn=program.asynchronous)
        out, index = list[Action](), 0
        for action, leaving in zip(actions, sent(rank, batch), strict=True):
            if action.is_compute:
                out += before.get(index, [])
                index += 1
            out += [action, *leaving]
        return out if index else out + before.get(0, [])

    return replace(program, order=order, has_communication=True, silent_order=silent)


def _place_receives(
    rank: int, wanted: list[tuple[Action, Due]], sent_by: Callable[[int], list[list[Action]]], *, in_turn: bool
) -> dict[int, list[Action]]:
    """Index of a computation -> receives to post before it: of each rank as it sends them, or by micro-batch."""
    placed: list[tuple[Due, Action]] = []
    for source in sorted({recv.peer for recv, _ in wanted}):
        messages = [message for message in wanted if message[0].peer == source]
        if in_turn:
            # Some were sent in the iteration before; from each rank they come in the order of the micro-batches.
            messages.sort(key=lambda message: message[0].microbatch)
        else:
            sent = (send for sends_of_one in sent_by(source) for send in sends_of_one)
            place = {matching_recv(send, source): number for number, send in enumerate(sent) if send.peer == rank}
            # What is never sent (a schedule file may forget a computation) comes last: the validator names it.
            messages.sort(key=lambda message: place.get(message[0], len(place)))
        latest = messages[-1][1]
        for recv, due in reversed(messages):  # none is posted later than any message that is sent after it
            latest = min(latest, due)
            placed.append((latest, recv))
    # The sort is stable, and reversing restores the order of the sends among receives that are due together.
    before: dict[int, list[Action]] = {}
    for (position, _), recv in sorted(reversed(placed), key=lambda item: item[0]):
        before.setdefault(position, []).append(recv)
    return before
