"""A parallel axis as a value: one direction of the grid of ranks, with its process group.

An axis of size 1 has no group and costs nothing, so the same code in one process is the reference. `comm.mesh` makes
the axes of a run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor


class WaitClock:
    """Seconds for which communication blocked this rank's host: a slow rank has few, the ranks that wait for it many.

    (NCCL blocks the device instead of the host: there it is a `DeviceWaitClock`.)
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._began

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass(frozen=True)
class Axis:
    """One axis of the grid, seen from one rank.

    name: of the base axes that it consists of, joined by `*`.
    size: number of ranks along it.
    rank: this process's coordinate.
    ranks: ranks[i] is the world rank at coordinate i.
    group: the process group, None where `size` is 1, or nobody is connected.
    waits: counts the time spent waiting for the other ranks; the axes of a mesh share one.
    shared: carries CPU tensors through shared memory (`comm.shared_memory.share_axis`), or nowhere, or None.
    even: whether its ranks lie in the order of a grid.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: Any = field(default=None, repr=False, compare=False)
    waits: WaitClock = field(default_factory=WaitClock, repr=False, compare=False)
    shared: Any = field(default=None, repr=False, compare=False)
    even: bool = True

    @classmethod
    def single(cls, name: str, world_rank: int = 0) -> Axis:
        """An axis of one rank: every collective over it is the identity."""
        return cls(name, 1, 0, (world_rank,))

    @property
    def names(self) -> frozenset[str]:
        """The base axes along which its ranks differ; none if its size is 1."""
        return frozenset(self.name.split("*")) if self.size > 1 else frozenset()

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class FamilyAxes:
    """The axes of a family of parameters on this rank; for the fields see `inventory.families`."""

    name: str
    cut: tuple[Axis, ...]
    shard: Axis
    replicate: Axis

    def alike(self, sharded: frozenset[str], *, everywhere: bool) -> list[Axis]:
        """The axes along which a parameter that is cut over the axes `sharded` is replicated, outermost first.

        everywhere: whether all ranks of the shard axis hold it, too.
        """
        copies = (self.replicate, self.shard) if everywhere else (self.replicate,)
        return [*copies, *(axis for axis in reversed(self.cut) if axis.name not in sharded)]


@dataclass(frozen=True)
class ContextAxes:
    """The ranks that share a sequence, and how attention sees the tokens of the others.

    heads: among these ranks tokens are traded for heads.
    ring: among these, keys and values travel in a ring.
    gathers: they are gathered instead.
    """

    heads: Axis = field(default_factory=lambda: Axis.single("cp_heads"))
    ring: Axis = field(default_factory=lambda: Axis.single("cp_ring"))
    gathers: bool = False

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.heads.size * self.ring.size


@dataclass(frozen=True)
class ExpertAxes:
    """etp: its ranks share each expert. ep: experts are dealt out over its ranks, and tokens travel to them. library:
    what carries tokens in place of messages of our own (`parallel.expert.TokenLibrary`)."""

    etp: Axis = field(default_factory=lambda: Axis.single("etp"))
    ep: Axis = field(default_factory=lambda: Axis.single("ep"))
    library: Any = None


class Nobody:
    """Whom tensors without values are sent to: nothing arrives, and nobody waits."""

    def all_reduce_(self, x: Tensor, op: str) -> Self:
        return self

    def all_gather_into(self, out: Tensor, x: Tensor) -> Self:
        return self

    reduce_scatter_into = all_gather_into

    def all_to_all_rows(self, out: Tensor, x: Tensor, traffic: Sequence[Sequence[int]]) -> Self:
        return self

    def wait(self) -> None:
        return None


def make_axis(
    name: str,
    lists: Sequence[Sequence[int]],
    rank: int,
    *,
    share: bool = True,
    timeout: timedelta | None = None,
    connects: bool = True,
) -> Axis:
    """Makes a process group for every list of ranks and returns the axis of the list that holds `rank`.

    Collective. Lists of fewer than two ranks get no group; a list of all ranks shares the default group unless `share`
    is False. timeout: of the new groups (None: torch's default, 30 minutes). connects: False: no list gets a group, and
    messages go to nobody.
    """
    mine = Axis.single(name, rank)
    for ranks in lists:
        if len(ranks) < 2:
            continue
        group = None
        if connects:
            whole_world = len(ranks) == dist.get_world_size() and list(ranks) == sorted(ranks)
            group = dist.group.WORLD if whole_world and share else _new_group(list(ranks), timeout)
        if rank in ranks:
            shared = None if connects else Nobody()
            mine = Axis(name, len(ranks), list(ranks).index(rank), tuple(ranks), group, shared=shared)
    return mine


def _new_group(ranks: list[int], timeout: timedelta | None) -> Any:
    """A process group, with devices for device tensors only: gloo, which opens a socket to every other rank, exists
    once for the world and is not made again for each axis."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config(dist.group.WORLD)):
        return dist.new_group(ranks, timeout=timeout, backend="nccl")
    return dist.new_group(ranks, timeout=timeout)
