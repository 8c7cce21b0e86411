"""The grid of ranks and its process groups (Megatron-LM's `parallel_state`), with a parallel axis as a value.

`Axis` is one direction of the grid with its process group; `ParallelMesh` is the grid. Both are built once and passed
to the code that needs them. An axis of size 1 has no group and costs nothing, so the same code in one process is the
reference.

The grid has base axes, innermost first (Megatron's tp-cp-ep-dp-pp order). There are two views of it, one for dense
parameters and one for those of experts:

    q = tp + TP * (cp + CP * dp)  =  etp + ETP * (ep + EP * edp)           world rank = q + TP * CP * DP * pp

Data parallelism is itself a product, `dp = dp_shard + DP_SHARD * dp_replicate`, and so are `edp` (ZeRO shards over the
inner factor, neighbours first) and `cp = cp_heads + CP_HEADS * cp_ring` (`parallel.context`). Any product of base axes
of one view is an axis: `mesh["tp"]`, `mesh.over("dp", "cp")`. Its communicator is made at its first use, so a run has
only those that it uses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import prod
from typing import Any

import torch.distributed as dist

from megalite.errors import ConfigError
from megalite.inventory import AXIS_FAMILIES

DENSE = ("tp", "cp_heads", "cp_ring", "dp_shard", "dp_replicate", "pp")
EXPERT = ("etp", "ep", "edp_shard", "edp_replicate", "pp")
PRODUCTS = {
    "cp": ("cp_heads", "cp_ring"),
    "dp": ("dp_shard", "dp_replicate"),
    "edp": ("edp_shard", "edp_replicate"),
    "world": DENSE,
}


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
    group: the process group, None exactly when `size` is 1.
    waits: counts the time spent waiting for the other ranks; the axes of a mesh share one.
    shared: carries CPU tensors through shared memory (`comm.shared_memory.share_axis`), or None.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: Any = field(default=None, repr=False, compare=False)
    waits: WaitClock = field(default_factory=WaitClock, repr=False, compare=False)
    shared: Any = field(default=None, repr=False, compare=False)

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

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


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
    """etp: its ranks share each expert. ep: experts are dealt out over its ranks, and tokens travel to them."""

    etp: Axis = field(default_factory=lambda: Axis.single("etp"))
    ep: Axis = field(default_factory=lambda: Axis.single("ep"))


class ParallelMesh:
    """The grid of ranks, seen from one of them.

    `size` and `coordinate` are arithmetic and may be called anywhere. `mesh[name]`, `over` and `through` make a
    communicator the first time: they are collective over the world, so every rank calls them with the same arguments in
    the same order. That happens while a run is built. `complete` ends it, and to make another communicator later is an
    error instead of a hang.
    """

    def __init__(self, rank: int, dense: dict[str, int], expert: dict[str, int], *, timeout: float | None) -> None:
        self.rank = rank
        self.waits = WaitClock()
        self._views = (dense, expert)
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self._axes: dict[tuple[str, str], Axis] = {}
        self._complete = False

    @classmethod
    def single(cls) -> ParallelMesh:
        """The mesh of one process: no process group exists."""
        return cls.build(rank=0, size=1)

    @classmethod
    def build(
        cls,
        *,
        rank: int,
        size: int,
        tp: int = 1,
        cp: int = 1,
        cp_heads: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        dp_replicate: int = 1,
        timeout: float | None = None,
    ) -> ParallelMesh:
        """The mesh of `size` ranks, without a communicator yet.

        cp_heads: how many of the cp ranks of a sequence trade tokens for heads.
        etp: tp if not given; dp and edp follow from the other sizes.
        dp_replicate: copies of the shards of optimizer state (hybrid sharding).
        timeout: seconds that a collective over any axis but the world may take (None: torch's default).

        Raises ConfigError if the sizes do not divide the world, or dp_replicate does not divide dp and edp.
        """
        dense = _view(DENSE, size, (tp, cp_heads, cp // cp_heads), dp_replicate, pp)
        expert = _view(EXPERT, size, (tp if etp is None else etp, ep), dp_replicate, pp)
        return cls(rank, dense, expert, timeout=timeout)

    # ---- arithmetic --------------------------------------------------------------------------------------------------

    def size(self, *names: str) -> int:
        """Number of ranks along a product of axes."""
        view, bases = self._resolve(names)
        return prod(view[base] for base in bases)

    def coordinate(self, name: str) -> int:
        """This rank's coordinate on an axis."""
        view, bases = self._resolve([name])
        place = _coordinates(self.rank, view)
        result = 0
        for base in reversed(bases):
            result = result * view[base] + place[base]
        return result

    def _resolve(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        """(The view that has all these axes, their base axes of more than one rank)."""
        wanted = {base for name in names for base in PRODUCTS.get(name, (name,))}
        for view in self._views:
            if wanted <= set(view):
                return view, tuple(base for base in view if base in wanted and view[base] > 1)
        raise ValueError(f"no view of the mesh has the axes {sorted(wanted)}")

    def _lines(self, view: dict[str, int], bases: Sequence[str]) -> list[list[int]]:
        """All lists of world ranks that differ along these base axes only."""
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank in range(prod(view.values())):
            place = _coordinates(rank, view)
            lines.setdefault(tuple(place[base] for base in view if base not in bases), []).append(rank)
        return list(lines.values())

    # ---- axes --------------------------------------------------------------------------------------------------------

    @property
    def world(self) -> Axis:
        """All ranks, with the default process group."""
        return self["world"]

    def __getitem__(self, name: str) -> Axis:
        """The axis of this name (see the module)."""
        return self.over(name)

    def over(self, *names: str, apart: str = "") -> Axis:
        """The product of some axes, ranks in the order of the grid. Collective at first use.

        apart: names a communicator of its own, for messages that need not keep an order with any others.
        """
        view, bases = self._resolve(names)
        return self._axis("*".join(bases) or names[0], self._lines(view, bases), apart)

    def spanning(self, *names: str) -> Axis:
        """The product of some axes, or where those of experts are among them, which lie across the others, of the
        named ones and all axes of a stage. Collective at first use."""
        dense = [name for name in names if set(PRODUCTS.get(name, (name,))) <= set(DENSE)]
        return self.over(*dense, *(("tp", "cp", "dp") if len(dense) < len(names) else ()))

    def through(self, coordinates: Sequence[int], *, apart: str) -> Axis:
        """An axis through some coordinates of the pipeline (tied embeddings: first and last; Chimera: the replicas of
        a stage). Collective at first use; a rank that is at none of them gets an axis of size 1.

        It has a communicator of its own even if it goes through all ranks: its messages are started at different places
        on different ranks, so they keep no order with any others.
        """
        lines = self._lines(self._views[0], ["pp"])
        return self._axis("pp", [[line[p] for p in coordinates] for line in lines], apart)

    def family(self, name: str = "dense") -> FamilyAxes:
        """The axes of a family. Collective at first use."""
        family = AXIS_FAMILIES[name]
        cut = tuple(self[axis] for axis in family.cut)
        return FamilyAxes(name, cut, self.over(*family.shard), self.over(*family.replicate))

    def context(self, *, gathers: bool) -> ContextAxes:
        """The axes over which a sequence is cut. Collective at first use."""
        return ContextAxes(self["cp_heads"], self["cp_ring"], gathers)

    def experts(self) -> ExpertAxes:
        """The axes over which experts are cut and dealt out. Collective at first use."""
        return ExpertAxes(self["etp"], self["ep"])

    def adopt(self, axis: Axis) -> None:
        """Replaces the axis of this name by `axis`, the same ranks with another transport."""
        self._axes[axis.name, ""] = axis

    def complete(self) -> None:
        """Declares that all communicators of the run exist."""
        self._complete = True

    def _axis(self, name: str, lines: Sequence[Sequence[int]], apart: str) -> Axis:
        axis = self._axes.get((name, apart))
        if axis is None:
            new = any(len(ranks) > 1 for ranks in lines)
            assert not (new and self._complete), f"the communicator of {name} {apart} has to be made with the run"
            axis = make_axis(apart or name, lines, self.rank, share=not apart, timeout=self._timeout)
            axis = self._axes[name, apart] = replace(axis, waits=self.waits)
        return axis

    def __str__(self) -> str:
        """`tp2 x pp4 x dp2`, axes of size 1 left out."""
        sizes = {name: self.size(name) for name in ("tp", "cp", "pp", "dp", "ep")}
        return " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one process"


def _view(names: Sequence[str], world: int, inner: tuple[int, ...], replicate: int, pp: int) -> dict[str, int]:
    """Sizes of the base axes `names`; the one after `inner` gets what the others leave of the world."""
    if min(sizes := (*inner, replicate, pp)) < 1:
        raise ConfigError(f"world size {world}: sizes of axes are at least 1, not {min(sizes)}")
    used = prod(inner) * pp
    if world % used:
        label = "*".join(name for name, size in zip(names, inner, strict=False) if size > 1 or name == names[0])
        raise ConfigError([f"world size {world}: not divisible by {label}*pp={used}"])
    if world // used % replicate:
        raise ConfigError(f"dp_replicate={replicate}: does not divide the data-parallel size {world // used}")
    return dict(zip(names, (*inner, world // used // replicate, replicate, pp), strict=True))


def _coordinates(rank: int, view: dict[str, int]) -> dict[str, int]:
    """The rank formula: a world rank's coordinates, mixed radix, innermost first."""
    place = {}
    for base, size in view.items():
        rank, place[base] = divmod(rank, size)
    return place


def make_axis(
    name: str, lists: Sequence[Sequence[int]], rank: int, *, share: bool = True, timeout: timedelta | None = None
) -> Axis:
    """Makes a process group for every list of ranks and returns the axis of the list that holds `rank`.

    Collective. Lists of fewer than two ranks get no group; a list of all ranks shares the default group unless `share`
    is False. timeout: of the new groups (None: torch's default, 30 minutes).
    """
    mine = Axis.single(name, rank)
    for ranks in lists:
        if len(ranks) < 2:
            continue
        whole_world = len(ranks) == dist.get_world_size() and list(ranks) == sorted(ranks)
        group = dist.group.WORLD if whole_world and share else _new_group(list(ranks), timeout)
        if rank in ranks:
            mine = Axis(name, len(ranks), list(ranks).index(rank), tuple(ranks), group)
    return mine


def _new_group(ranks: list[int], timeout: timedelta | None) -> Any:
    """A process group, with devices for device tensors only: gloo, which opens a socket to every other rank, exists
    once for the world and is not made again for each axis."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config(dist.group.WORLD)):
        return dist.new_group(ranks, timeout=timeout, backend="nccl")
    return dist.new_group(ranks, timeout=timeout)
