"""The grid of ranks and its process groups (Megatron-LM's `parallel_state`); what code gets of it are axes.

The grid has base axes, innermost first (Megatron's tp-cp-ep-dp-pp order). There are two views of it, one for dense
parameters and one for those of experts:

    q = tp + TP * (cp + CP * dp)  =  etp + ETP * (ep + EP * edp)         world rank = first of the stage + q

The mesh is a list of such grids, one a stage; in most runs they are alike, and the first rank of stage s is TP * CP *
DP * s. Where they are not (`--stage-meshes`), the replicas of a stage take the micro-batches of one stream in turn:
each is a pipeline rank of its own, and an axis that goes across stages goes through all ranks.

Data parallelism is itself a product, `dp = dp_shard + DP_SHARD * dp_replicate`, and so are `edp` (ZeRO shards over the
inner factor, neighbours first) and `cp = cp_heads + CP_HEADS * cp_ring` (`parallel.context`). Any product of base axes
of one view is an axis: `mesh["tp"]`, `mesh.over("dp", "cp")`. Its communicator is made at its first use, so a run has
only those that it uses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple

from megalite.comm.axis import Axis, ContextAxes, FamilyAxes, WaitClock, make_axis
from megalite.comm.ring import Parts, neighbours
from megalite.errors import ConfigError
from megalite.inventory import AXIS_FAMILIES, DIRECT, fastest_way

DENSE = ("tp", "cp_heads", "cp_ring", "dp_shard", "dp_replicate", "pp")
EXPERT = ("etp", "ep", "edp_shard", "edp_replicate", "pp")
PRODUCTS = {
    "cp": ("cp_heads", "cp_ring"),
    "dp": ("dp_shard", "dp_replicate"),
    "edp": ("edp_shard", "edp_replicate"),
    "stream": ("dp_shard", "dp_replicate"),
    "world": DENSE,
}
"""stream: the replicas that read micro-batches of their own: all, but where stages differ."""


Views = dict[tuple[str, ...], dict[str, int]]
"""DENSE and EXPERT -> sizes of their base axes."""


class StageGrid(NamedTuple):
    """The ranks of one stage: its first world and pipeline rank, and the sizes of the base axes in both views."""

    first: int
    pipeline: int
    sizes: Views

    @property
    def size(self) -> int:
        return prod(self.sizes[DENSE].values())


class ParallelMesh:
    """The grids of ranks, one a stage, seen from one of them.

    `size` and `coordinate` are arithmetic and may be called anywhere. `mesh[name]`, `over` and `through` make a
    communicator the first time: they are collective over the world, so every rank calls them with the same arguments in
    the same order. That happens while a run is built. `complete` ends it, and to make another communicator later is an
    error instead of a hang.
    """

    def __init__(self, rank: int, grids: Sequence[Views], *, timeout: float | None, connects: bool = True) -> None:
        self.rank = rank
        self.waits = WaitClock()
        self.takes_turns = any(grid != grids[0] for grid in grids)
        self.hosts: Sequence[str] = ()
        """Of each rank, where a run has several."""
        self._grids: list[StageGrid] = []
        first = pipeline = 0
        for sizes in grids:
            self._grids.append(StageGrid(first, pipeline, sizes))
            first += self._grids[-1].size
            pipeline += sizes[DENSE]["dp_shard"] * sizes[DENSE]["dp_replicate"] if self.takes_turns else 1
        self._world, self._pipeline = first, pipeline
        self._how: Any = {"timeout": None if timeout is None else timedelta(seconds=timeout), "connects": connects}
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
        stages: Sequence[tuple[int, int]] = (),
        timeout: float | None = None,
        connects: bool = True,
    ) -> ParallelMesh:
        """The mesh of `size` ranks, without a communicator yet.

        cp_heads: how many of the cp ranks of a sequence trade tokens for heads.
        etp: tp if not given; dp and edp follow from the other sizes.
        dp_replicate: copies of the shards of optimizer state (hybrid sharding).
        stages: (tp, dp) of each stage, in place of all of these sizes.
        timeout: seconds that a collective over any axis but the world may take (None: torch's default).
        connects: False: axes have no process groups, and messages go to nobody.

        Raises ConfigError if the sizes do not divide the world, or dp_replicate does not divide dp and edp.
        """
        if stages and (needed := sum(tp * dp for tp, dp in stages)) != size:
            raise ConfigError(f"world size {size}: the stages have {needed} ranks")
        grids = [_views(tp * dp, (tp, 1, 1), (tp, 1), 1, 1) for tp, dp in stages]
        dense, expert = (tp, cp_heads, cp // cp_heads), (tp if etp is None else etp, ep)
        grids = grids or [_views(size, dense, expert, dp_replicate, pp)] * pp
        return cls(rank, grids, timeout=timeout, connects=connects)

    # ---- arithmetic --------------------------------------------------------------------------------------------------

    def size(self, *names: str) -> int:
        """Number of ranks along a product of axes."""
        view, bases = self._resolve(names)
        if self.takes_turns and "pp" in bases:
            return self._pipeline if set(bases) == {"pp"} else self._world
        return prod(self._sizes(self._grid(self.rank), view)[base] for base in bases)

    def coordinate(self, name: str) -> int:
        """This rank's coordinate on an axis."""
        view, bases = self._resolve([name])
        if self.takes_turns and len(bases) > 1 and "pp" in bases:
            return self.rank
        sizes, place = self._sizes(self._grid(self.rank), view), self._place(self.rank, view)
        result = 0
        for base in reversed(bases):
            result = result * sizes[base] + place[base]
        return result

    def ranks_of(self, pipeline_rank: int) -> range:
        """World ranks of a pipeline rank: the tensor-parallel ranks of one replica, this rank's where several replicas
        have the same."""
        grid = self._grids[bisect_right(self._grids, pipeline_rank, key=lambda grid: grid.pipeline) - 1]
        own = self._grid(self.rank)
        replica = (
            pipeline_rank - grid.pipeline if self.takes_turns else (self.rank - own.first) // own.sizes[DENSE]["tp"]
        )
        first = grid.first + grid.sizes[DENSE]["tp"] * replica
        return range(first, first + grid.sizes[DENSE]["tp"])

    def way_between(self, sender: int, receiver: int) -> str:
        """How copies go from one pipeline rank to another: directly on a host, else as the busiest host's link is free
        soonest (`inventory.fastest_way`)."""
        if not self.hosts:
            return DIRECT
        here, there = ({self.hosts[rank] for rank in self.ranks_of(each)} for each in (sender, receiver))
        return fastest_way(len(here), len(there), len(self.ranks_of(receiver))) if here.isdisjoint(there) else DIRECT

    def _grid(self, rank: int) -> StageGrid:
        return self._grids[bisect_right(self._grids, rank, key=lambda grid: grid.first) - 1]

    def _sizes(self, grid: StageGrid, view: tuple[str, ...]) -> dict[str, int]:
        """Sizes of the base axes of a view, with that of the pipeline."""
        return {**grid.sizes[view], "pp": self._pipeline}

    def _place(self, rank: int, view: tuple[str, ...]) -> dict[str, int]:
        """A world rank's coordinates."""
        grid, place = self._grid(rank), {}
        rest = rank - grid.first
        for base, size in grid.sizes[view].items():  # mixed radix, innermost first
            rest, place[base] = divmod(rest, size)
        turn = place["dp_shard"] if self.takes_turns and view is DENSE else 0
        return {**place, "pp": grid.pipeline + turn}

    def _resolve(self, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(The view that has all these axes, their base axes that have more than one rank on some stage)."""
        own = [name for name in names if name != "stream" or not self.takes_turns]
        wanted = {base for name in own for base in PRODUCTS.get(name, (name,))}
        for view in (DENSE, EXPERT):
            if wanted <= set(view):
                sizes = [self._sizes(grid, view) for grid in self._grids]
                return view, tuple(base for base in view if base in wanted and max(s[base] for s in sizes) > 1)
        raise ValueError(f"no view of the mesh has the axes {sorted(wanted)}")

    def _lines(self, view: tuple[str, ...], bases: Sequence[str]) -> list[list[int]]:
        """All lists of world ranks that differ along these base axes only; across unlike stages, of all ranks."""
        if self.takes_turns and "pp" in bases:
            return [list(range(self._world))]
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self._world):
            place = self._place(rank, view)
            stage = -1 if "pp" in bases else self._grid(rank).first
            others = (place[base] for base in view if base not in bases and base != "pp")
            lines.setdefault((stage, *others), []).append(rank)
        return list(lines.values())

    # ---- axes --------------------------------------------------------------------------------------------------------

    @property
    def world(self) -> Axis:
        """All ranks, with the default process group."""
        return self["world"]

    def __getitem__(self, name: str) -> Axis:
        """The axis of this name (see the module)."""
        return self.over(name)

    def over(self, *names: str, apart: str = "", parts: Parts = lambda ranks: [ranks]) -> Axis:
        """The product of some axes, ranks in the order of the grid. Collective at first use.

        apart: names a communicator of its own, for messages that need not keep an order with any others. parts: into
        which the ranks of the product are divided.
        """
        view, bases = self._resolve(names)
        lines = [part for line in self._lines(view, bases) for part in parts(line)]
        return self._axis("*".join(bases) or names[0], lines, apart)

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
        assert not (self.takes_turns and coordinates), "an axis through some stages has one rank of each"
        lines = self._lines(DENSE, ["pp"])
        return self._axis("pp", [[line[p] for p in coordinates] for line in lines], apart)

    def sharing_keys(self, heads: int) -> Axis:
        """Neighbours on the tensor axis that share one of `heads` key/value heads, where there are fewer of these than
        ranks. Collective at first use."""
        if heads == 1:
            return self["tp"]
        return self.over("tp", apart="keys", parts=lambda ranks: neighbours(ranks, max(1, len(ranks) // heads)))

    def family(self, name: str = "dense") -> FamilyAxes:
        """The axes of a family. Collective at first use."""
        family = AXIS_FAMILIES[name]
        cut = tuple(self[axis] for axis in family.cut)
        return FamilyAxes(name, cut, self.over(*family.shard), self.over(*family.replicate))

    def context(self, *, gathers: bool) -> ContextAxes:
        """The axes over which a sequence is cut. Collective at first use."""
        return ContextAxes(self["cp_heads"], self["cp_ring"], gathers)

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
            axis = make_axis(apart or name, lines, self.rank, share=not apart, **self._how)
            even = not (self.takes_turns and "pp" in name.split("*"))
            axis = self._axes[name, apart] = replace(axis, waits=self.waits, even=even)
        return axis

    def __str__(self) -> str:
        """`tp2 x pp4 x dp2`, axes of size 1 left out; of stages that differ `4x1,2x2`, tp x dp of each."""
        if self.takes_turns:
            return ",".join(f"{grid.sizes[DENSE]['tp']}x{grid.sizes[DENSE]['dp_shard']}" for grid in self._grids)
        sizes = {name: self.size(name) for name in ("tp", "cp", "pp", "dp", "ep")}
        return " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one process"


def _views(world: int, dense: tuple[int, ...], expert: tuple[int, ...], replicate: int, pp: int) -> Views:
    """A stage's grid in both views."""
    inner = {DENSE: dense, EXPERT: expert}
    return {view: _view(view[:-1], world, sizes, replicate, pp) for view, sizes in inner.items()}


def _view(names: Sequence[str], world: int, inner: tuple[int, ...], replicate: int, pp: int) -> dict[str, int]:
    """Sizes of the base axes `names` of a stage; the one after `inner` gets what the others leave of the world."""
    if min(sizes := (*inner, replicate, pp)) < 1:
        raise ConfigError(f"world size {world}: sizes of axes are at least 1, not {min(sizes)}")
    used = prod(inner) * pp
    if world % used:
        label = "*".join(name for name, size in zip(names, inner, strict=False) if size > 1 or name == names[0])
        raise ConfigError([f"world size {world}: not divisible by {label}*pp={used}"])
    if world // used % replicate:
        raise ConfigError(f"dp_replicate={replicate}: does not divide the data-parallel size {world // used}")
    return dict(zip(names, (*inner, world // used // replicate, replicate), strict=True))
