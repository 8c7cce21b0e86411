"""Do the messages of a program arrive (V3)? They must match in order, and no rank may wait forever.

Transports promise little: messages between two ranks are matched by order, not by name, and a send may complete only
together with its receive (rendezvous). Besides, NCCL runs all messages of a communicator in the order in which a rank
issued them. Three models of which messages share an order:

    pair        every directed pair of ranks has its own          (gloo; one communicator per pair and direction)
    direction   each rank has one for messages to higher ranks and one for messages to lower ranks
    rank        each rank has a single one                        (one communicator for everything)

Computation is never blocked by a send; it waits for its own receives.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from megalite.schedule.action import RECV_KINDS, SEND_KINDS, Action
from megalite.schedule.passes import matching_recv, receives
from megalite.schedule.simulate import ResultKey, dependencies, produced
from megalite.schedule.stage_placement import StagePlacement


class MessageFault(NamedTuple):
    """What is wrong, and where: (rank, position in its list)."""

    message: str
    rank: int
    position: int


def fifo_faults(lists: Sequence[Sequence[Action]]) -> Iterator[MessageFault]:
    """On every directed pair of ranks the receives must be the sends, in the same order."""
    sent: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank, actions in enumerate(lists):
        for position, action in enumerate(actions):
            if action.kind in SEND_KINDS:
                sent[rank, action.peer].append((position, action))
            elif action.kind in RECV_KINDS:
                received[action.peer, rank].append((position, action))
    for source, target in sorted(sent.keys() | received.keys()):
        sends, recvs = sent[source, target], received[source, target]
        for (_, send), (position, recv) in zip(sends, recvs, strict=False):
            expected = matching_recv(send, source)
            if recv != expected:
                yield MessageFault(f"rank {target} receives {recv} where rank {source} sends {send}", target, position)
                break
        else:
            if len(sends) > len(recvs):
                position, send = sends[len(recvs)]
                yield MessageFault(f"rank {source} sends {send}, which rank {target} never receives", source, position)
            elif len(recvs) > len(sends):
                position, recv = recvs[len(sends)]
                yield MessageFault(f"rank {target} receives {recv}, which rank {source} never sends", target, position)


class Rendezvous:
    """The lists of all ranks, run under rendezvous semantics by a model of which messages share an order."""

    def __init__(self, lists: Sequence[Sequence[Action]], placement: StagePlacement, model: str) -> None:
        self.lists, self.placement, self.model = lists, placement, model
        self.position = [0] * len(lists)
        self.needs: list[tuple[int, list[tuple[int, Action]], list[ResultKey]]] = [(-1, [], [])] * len(lists)
        self.done: set[tuple[str, int, int, int]] = set()
        self.arrived: set[tuple[int, Action]] = set()
        self.queues: dict[tuple[int, Hashable], deque[Action]] = defaultdict(deque)
        self.queues_of: dict[int, set[tuple[int, Hashable]]] = defaultdict(set)

    def faults(self) -> list[MessageFault]:
        """Where ranks are stuck; nothing if all of them finish."""
        todo = set(range(len(self.lists)))
        while todo:
            rank = todo.pop()
            while self._advance(rank):
                pass
            todo |= self._deliver(rank)
        stuck = [r for r, actions in enumerate(self.lists) if self.position[r] < len(actions)]
        faults = [
            MessageFault(f"rank {r} waits at {self.lists[r][self.position[r]]}", r, self.position[r]) for r in stuck
        ]
        unmatched = sorted((rank, queue[0]) for (rank, _), queue in self.queues.items() if queue)
        return faults or [
            MessageFault(f"rank {rank} ends with {action} unmatched", rank, self.lists[rank].index(action))
            for rank, action in unmatched
        ]

    def _queue(self, rank: int, action: Action) -> tuple[int, Hashable]:
        """The ordered queue of `rank` that a SEND or RECV joins; the second part is the same at both ends."""
        source, target = (rank, action.peer) if action.kind in SEND_KINDS else (action.peer, rank)
        share: Hashable = {"pair": (source, target), "direction": target > source, "rank": None}[self.model]
        return rank, share

    def _advance(self, rank: int) -> bool:
        """Issue the rank's next action; False if it must wait or the list is at its end."""
        if self.position[rank] >= len(self.lists[rank]):
            return False
        action = self.lists[rank][self.position[rank]]
        if action.kind in SEND_KINDS or action.kind in RECV_KINDS:
            key = self._queue(rank, action)
            self.queues[key].append(action)
            self.queues_of[rank].add(key)
        elif action.is_compute:
            place = self.position[rank]
            if self.needs[rank][0] != place:
                local = [key for source, key in dependencies(action, self.placement) if source == rank]
                self.needs[rank] = place, [(rank, recv) for recv in receives(action, self.placement)], local
            _, messages, results = self.needs[rank]
            if not self.arrived.issuperset(messages) or not self.done.issuperset(results):
                return False
            self.done.update(produced(action))
        self.position[rank] += 1
        return True

    def _deliver(self, rank: int) -> set[int]:
        """Completes all messages that are at the head of both their queues, beginning with those of `rank`."""
        touched: set[int] = set()
        check = [key for key in self.queues_of[rank] if self.queues[key]]
        while check:
            key = check.pop()
            queue = self.queues[key]
            if not queue:
                continue
            head = queue[0]
            other_key = head.peer, key[1]
            other = self.queues[other_key]
            if not other:
                continue
            send, recv, sender = (head, other[0], key[0]) if head.kind in SEND_KINDS else (other[0], head, head.peer)
            if send.kind in SEND_KINDS and recv == matching_recv(send, sender):
                queue.popleft()
                other.popleft()
                self.arrived.add((send.peer, recv))
                touched |= {key[0], other_key[0]}
                check += [key, other_key]
        return touched
