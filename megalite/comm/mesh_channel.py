"""Channels between pipeline ranks whose tensors lie differently (`--stage-meshes`), or whose link is slower than the
one among the tensor-parallel ranks at its ends.

A message of the program is several here: those of a `TransferPlan`. Every one is labelled, checked and counted as
elsewhere; they go between world ranks, point to point, and need no groups but the stage's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megalite.comm.axis import Axis
from megalite.comm.collectives import all_gather_into
from megalite.comm.mesh import ParallelMesh
from megalite.comm.p2p import Channel, IncomingMessage, MessageLabel, TensorSpec
from megalite.inventory import TransferPlan, tiles, transfer_plan


@dataclass(frozen=True)
class Routes:
    """Which world ranks a pipeline rank consists of, and how its tensors lie on them.

    own: this pipeline rank. ranks_of: pipeline rank -> its world ranks. split: whether each of them holds a part of the
    sequence (sequence parallelism), else all of it. gathers: (pipeline ranks) -> whether a tensor crosses between them
    once, in parts.
    """

    own: int
    ranks_of: Callable[[int], range]
    split: bool
    gathers: Callable[[int, int], bool]

    def plan(self, sender: int, receiver: int, whole: tuple[int, ...]) -> TransferPlan:
        """From one pipeline rank to another."""
        source, target = (len(self.ranks_of(rank)) for rank in (sender, receiver))
        return _plan(whole, source, target, self.split, self.gathers(sender, receiver))

    def pairs(self, neighbours: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
        """World ranks (lower, higher) that may send to each other."""
        return {(a, b) for low, high in neighbours for a in self.ranks_of(low) for b in self.ranks_of(high)}


@cache
def _plan(whole: tuple[int, ...], source: int, target: int, split: bool, gather: bool) -> TransferPlan:
    return transfer_plan(whole, tiles(whole, source, split=split), tiles(whole, target, split=split), gather=gather)


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

    def post_recv(self, spec: TensorSpec, *, peer: int, label: MessageLabel) -> IncomingParts:
        plan, mine = self._routes.plan(peer, self._routes.own, self._whole(spec.shape)), self._tp.rank
        ranks = self._routes.ranks_of(peer)
        tasks = [task for task in plan.tasks if task.receiver == mine]
        box = tiles(plan.shape, self._tp.size, split=True)[mine] if plan.gathered else plan.target[mine]
        whole = torch.empty(box.shape, dtype=spec.dtype, device=spec.device)
        parts = []
        for task in tasks:
            part = TensorSpec(task.box.shape, spec.dtype, spec.device)
            into = whole[task.box.slices_in(box)]
            parts.append(self._post(part, peer=ranks[task.sender], label=label, into=into))
        return IncomingParts(parts, whole, spec.empty() if plan.gathered else None, self._tp)


def open_channel(
    mesh: ParallelMesh, neighbours: Collection[tuple[int, int]], *, split: bool, headers: bool = False
) -> Channel:
    """The channel of a run, down and up the pipeline by communicators of their own. Collective. Copies that go to
    another host go there once, in parts that are gathered there.

    neighbours: pipeline ranks (lower, higher) that send to each other. split: as in `Routes`.
    """
    gathers = bool(mesh.hosts) and not split and mesh.size("tp") > 1
    axis = "world" if gathers else "pp"
    down, up = (mesh.over(axis, apart=direction) for direction in ("down", "up"))
    if not (mesh.takes_turns or gathers):
        return Channel(down, up, neighbours, headers=headers)
    crosses = mesh.gathers_between if mesh.hosts else lambda sender, receiver: False
    routes = Routes(mesh.coordinate("pp"), mesh.ranks_of, split, crosses)
    return MeshChannel(down, up, neighbours, routes=routes, tp=mesh["tp"], headers=headers)
