"""Channels between pipeline ranks whose tensors lie differently (`--stage-meshes`), or whose link is slower than the
one among the tensor-parallel ranks at its ends.

A message of the program is several here: those of a `TransferPlan`. Every one is labelled, checked and counted as
elsewhere; they go between world ranks, point to point, and need no groups but the stage's own.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from megalite.comm.axis import Axis
from megalite.comm.collectives import all_gather
from megalite.comm.mesh import ParallelMesh
from megalite.comm.p2p import Channel, Incoming, MessageLabel, TensorSpec
from megalite.inventory import GATHERED, RELAYED, Box, TransferPlan, transfer_plan

Pairs = Collection[tuple[int, int]]


@dataclass
class IncomingParts:
    """Receives of parts of `whole`. parts: that have been posted, or calls that post them, where the rank before sends
    them on while it waits for the same message. onward: is given each as soon as it is here. gather: axis over which
    what arrived is put together, if any."""

    parts: Sequence[Incoming | Callable[[], Incoming]]
    whole: Tensor
    onward: Callable[[Tensor], None]
    gather: Axis | None

    def wait(self) -> Tensor:
        for part in [part() if callable(part) else part for part in self.parts]:
            self.onward(part.wait())
        return self.whole if self.gather is None else all_gather(self.whole, self.gather)


class MeshChannel(Channel):
    """Made by all ranks at the same time.

    down, up: axes of all ranks. neighbours: pipeline ranks (lower, higher) that send to each other. split: whether each
    rank holds a part of the sequence (sequence parallelism), else all of it.
    """

    def __init__(self, mesh: ParallelMesh, down: Axis, up: Axis, neighbours: Pairs, split: bool, headers: bool) -> None:
        self._mesh, self._tp, self._split, self._stage = mesh, mesh["tp"], split, mesh.coordinate("pp")
        super().__init__(down, up, self._pairs(neighbours), headers=headers)

    def _pairs(self, neighbours: Pairs) -> set[tuple[int, int]]:
        """World ranks (lower, higher) that may send to each other."""
        ranks = self._mesh.ranks_of
        found = {(a, b) for low, high in neighbours for a in ranks(low) for b in ranks(high)}
        for here, there in () if self._split else (*neighbours, *((high, low) for low, high in neighbours)):
            if self._mesh.way_between(here, there) == RELAYED:
                found |= set(pairwise(ranks(there)))
        return found

    def _plan(self, sender: int, receiver: int, shape: tuple[int, ...]) -> TransferPlan:
        """From one pipeline rank to another. shape: of what this rank has of the tensor."""
        whole = (shape[0] * (self._tp.size if self._split else 1), *shape[1:])
        sizes = (len(self._mesh.ranks_of(rank)) for rank in (sender, receiver))
        return transfer_plan(whole, *sizes, split=self._split, way=self._mesh.way_between(sender, receiver))

    def send(self, x: Tensor, *, peer: int, label: MessageLabel) -> None:
        plan = self._plan(self._stage, peer, tuple(x.shape))
        held, ranks = plan.source[self._tp.rank], self._mesh.ranks_of(peer)
        for task in plan.tasks:
            if task.sender == self._tp.rank:
                super().send(x[task.box.slices_in(held)], peer=ranks[task.receiver], label=label)

    def post_recv(self, spec: TensorSpec, *, peer: int, label: MessageLabel, into: Tensor | None = None) -> Incoming:
        plan, mine = self._plan(peer, self._stage, spec.shape), self._tp.rank
        ranks, own, box = self._mesh.ranks_of(peer), self._tp.ranks, plan.target[mine]
        whole = torch.empty(box.shape, dtype=spec.dtype, device=spec.device)

        def post(part: Box, sender: int) -> Incoming:
            its = TensorSpec(part.shape, spec.dtype, spec.device)
            return Channel.post_recv(self, its, peer=sender, label=label, into=whole[part.slices_in(box)])

        def onward(part: Tensor) -> None:
            if plan.way == RELAYED and mine + 1 < len(own):
                Channel.send(self, part, peer=own[mine + 1], label=label)

        if plan.way == RELAYED and mine > 0:
            return IncomingParts([partial(post, task.box, own[mine - 1]) for task in plan.tasks], whole, onward, None)
        posted = [post(task.box, ranks[task.sender]) for task in plan.tasks if task.receiver == mine]
        return IncomingParts(posted, whole, onward, self._tp if plan.way == GATHERED else None)


def open_channel(mesh: ParallelMesh, neighbours: Pairs, *, split: bool, headers: bool = False) -> Channel:
    """The channel of a run, down and up the pipeline by communicators of their own. Collective. Copies that go to
    another host go there once: in parts that are gathered there, or in chunks that are sent on from host to host."""
    copies = bool(mesh.hosts) and not split and mesh.size("tp") > 1
    down, up = (mesh.over("world" if copies else "pp", apart=direction) for direction in ("down", "up"))
    if mesh.takes_turns or copies:
        return MeshChannel(mesh, down, up, neighbours, split, headers)
    return Channel(down, up, neighbours, headers=headers)
