"""Channels between pipeline ranks whose tensors lie differently (`--stage-meshes`), or whose link is slower than the
one among the tensor-parallel ranks at its ends.

A message of the program is several here: those of a `TransferPlan`. Every one is labelled, checked and counted as
elsewhere; they go between world ranks, point to point, and need no groups but the stage's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from megalite.comm.axis import Axis
from megalite.comm.collectives import all_gather_into
from megalite.comm.mesh import ParallelMesh
from megalite.comm.p2p import Channel, Incoming, IncomingMessage, MessageLabel, TensorSpec
from megalite.inventory import DIRECT, RELAYED, TransferPlan, tiles, transfer_plan


@dataclass(frozen=True)
class Routes:
    """Which world ranks a pipeline rank consists of, and how its tensors lie on them.

    own: this pipeline rank. ranks_of: pipeline rank -> its world ranks. split: whether each of them holds a part of the
    sequence (sequence parallelism), else all of it. way: (pipeline ranks) -> how copies cross between them.
    """

    own: int
    ranks_of: Callable[[int], range]
    split: bool
    way: Callable[[int, int], str]

    def plan(self, sender: int, receiver: int, whole: tuple[int, ...]) -> TransferPlan:
        """From one pipeline rank to another."""
        source, target = (len(self.ranks_of(rank)) for rank in (sender, receiver))
        return _plan(whole, source, target, self.split, self.way(sender, receiver))

    def pairs(self, neighbours: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
        """World ranks (lower, higher) that may send to each other."""
        found = {(a, b) for low, high in neighbours for a in self.ranks_of(low) for b in self.ranks_of(high)}
        both = {*neighbours, *((high, low) for low, high in neighbours)}
        for receiver in () if self.split else {there for here, there in both if self.way(here, there) == RELAYED}:
            found |= set(pairwise(self.ranks_of(receiver)))
        return found


@cache
def _plan(whole: tuple[int, ...], source: int, target: int, split: bool, way: str) -> TransferPlan:
    return transfer_plan(whole, tiles(whole, source, split=split), tiles(whole, target, split=split), way=way)


@dataclass
class IncomingParts:
    """Receives that have been posted. whole: where they arrive; gathered: what they are put together in, if it is
    another tensor, over `axis`."""

    parts: list[IncomingMessage]
    whole: Tensor
    gathered: Tensor | None
    axis: Axis

    def wait(self) -> Tensor:
        for part in self.parts:
            part.wait()
        if self.gathered is None:
            return self.whole
        all_gather_into(self.gathered, self.whole, self.axis)
        return self.gathered


@dataclass
class RelayedParts:
    """Receives of chunks, each of which goes on to the next rank as soon as it is here.

    post: they are posted when they are waited for: the rank before sends them on while it waits for the same message.
    posted: but the first rank's, from another stage. onward: to the next rank; None: this is the last.
    """

    post: Sequence[Callable[[], IncomingMessage]]
    posted: list[IncomingMessage]
    whole: Tensor
    onward: Callable[[Tensor], None] | None

    def wait(self) -> Tensor:
        for chunk in self.posted or [post() for post in self.post]:
            arrived = chunk.wait()
            if self.onward is not None:
                self.onward(arrived)
        return self.whole


class MeshChannel(Channel):
    """Made by all ranks at the same time.

    down, up: axes of all ranks. tp: the tensor-parallel ranks that this one belongs to.
    """

    def __init__(
        self,
        down: Axis,
        up: Axis,
        neighbours: Collection[tuple[int, int]],
        *,
        routes: Routes,
        tp: Axis,
        headers: bool = False,
    ) -> None:
        super().__init__(down, up, routes.pairs(neighbours), headers=headers)
        self._routes, self._tp = routes, tp

    def _whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole tensor, of which this rank has one of `shape`."""
        return (shape[0] * (self._tp.size if self._routes.split else 1), *shape[1:])

    def send(self, x: Tensor, *, peer: int, label: MessageLabel) -> None:
        plan = self._routes.plan(self._routes.own, peer, self._whole(tuple(x.shape)))
        held, ranks = plan.source[self._tp.rank], self._routes.ranks_of(peer)
        for task in plan.tasks:
            if task.sender == self._tp.rank:
                super().send(x[task.box.slices_in(held)], peer=ranks[task.receiver], label=label)

    def post_recv(self, spec: TensorSpec, *, peer: int, label: MessageLabel) -> Incoming:
        plan, mine = self._routes.plan(peer, self._routes.own, self._whole(spec.shape)), self._tp.rank
        ranks = self._routes.ranks_of(peer)
        own = self._routes.ranks_of(self._routes.own)
        box = tiles(plan.shape, self._tp.size, split=True)[mine] if plan.gathered else plan.target[mine]
        whole = torch.empty(box.shape, dtype=spec.dtype, device=spec.device)
        tasks = [task for task in plan.tasks if task.receiver == mine or plan.relayed]
        relayed = plan.relayed and mine > 0
        post = []
        for task in tasks:
            part = TensorSpec(task.box.shape, spec.dtype, spec.device)
            sender = own[mine - 1] if relayed else ranks[task.sender]
            into = whole[task.box.slices_in(box)]
            post.append(partial(self._post, part, peer=sender, label=label, into=into))
        posted = [] if relayed else [one() for one in post]
        if not plan.relayed:
            return IncomingParts(posted, whole, spec.empty() if plan.gathered else None, self._tp)
        onward = partial(super().send, peer=own[mine + 1], label=label) if mine + 1 < len(own) else None
        return RelayedParts(post, posted, whole, onward)


def open_channel(
    mesh: ParallelMesh, neighbours: Collection[tuple[int, int]], *, split: bool, headers: bool = False
) -> Channel:
    """The channel of a run, down and up the pipeline by communicators of their own. Collective. Copies that go to
    another host go there once: in parts that are gathered there, or in chunks that are sent on from host to host.

    neighbours: pipeline ranks (lower, higher) that send to each other. split: as in `Routes`.
    """
    copies = bool(mesh.hosts) and not split and mesh.size("tp") > 1
    axis = "world" if copies else "pp"
    down, up = (mesh.over(axis, apart=direction) for direction in ("down", "up"))
    if not (mesh.takes_turns or copies):
        return Channel(down, up, neighbours, headers=headers)
    way = mesh.way_between if mesh.hosts else lambda sender, receiver: DIRECT
    routes = Routes(mesh.coordinate("pp"), mesh.ranks_of, split, way)
    return MeshChannel(down, up, neighbours, routes=routes, tp=mesh["tp"], headers=headers)
