"""A parallel axis is a value.

`Axis` names one direction of the grid of ranks and carries its process group; `ParallelMesh` is the grid. Both are
built once and passed to whoever needs them. An axis of size 1 has no group and costs nothing, so the same code in
one process is the reference.

Ranks are laid out with the tensor axis innermost, then data, then pipeline (Megatron's tp-dp-pp order):

    world rank = tp + tp_size * (dp + dp_size * pp)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from megalite.errors import ConfigError


class WaitClock:
    """Seconds for which this rank's host was blocked by communication: what tells a slow rank from those it keeps
    waiting. (NCCL blocks the device, not the host, so on GPUs it stays near zero.)"""

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
    """One axis: `ranks[i]` is the world rank at coordinate i, `rank` is this process's coordinate.

    `group` is None exactly when `size` is 1. `waits` counts the time spent waiting for the axis's other ranks; the
    axes of a mesh share one. `shared` carries CPU tensors through shared memory (`comm.shared_memory.share_axis`).
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
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class ParallelMesh:
    """The grid of ranks.

    world: all ranks. tp, dp, pp: this rank's lines through the grid. model: tp x pp at this dp coordinate (one whole
    copy of the model). dp is the product of `dp_replicate` and `dp_shard` (hybrid sharding; ZeRO shards over
    dp_shard, neighbours first).
    pp_down, pp_up: the same ranks as pp with their own communicators, one per direction, so that activations and
    gradients that cross between two ranks cannot block each other.
    """

    world: Axis
    tp: Axis
    dp: Axis
    pp: Axis
    model: Axis
    dp_shard: Axis
    dp_replicate: Axis
    pp_down: Axis
    pp_up: Axis

    @classmethod
    def single(cls) -> ParallelMesh:
        """The mesh of one process: no process group exists."""
        names = ("world", "tp", "dp", "pp", "model", "dp_shard", "dp_replicate", "pp_down", "pp_up")
        return cls(**{name: Axis.single(name) for name in names})

    @classmethod
    def build(cls, *, rank: int, size: int, tp: int = 1, pp: int = 1, dp_replicate: int = 1) -> ParallelMesh:
        """Builds the mesh of `size` ranks; collective: every rank of the world calls it with the same numbers.

        Raises ConfigError where tp * pp does not divide the world or dp_replicate does not divide dp.
        """
        if size % (tp * pp):
            raise ConfigError([f"world size {size}: not divisible by tp*pp={tp * pp}"])
        dp = size // (tp * pp)
        if dp % dp_replicate:
            raise ConfigError(
                [f"--num-distributed-optimizer-instances={dp_replicate}: does not divide data-parallel size {dp}"]
            )
        if size == 1:
            return cls.single()

        def world_rank(t: int, d: int, p: int) -> int:
            return t + tp * (d + dp * p)

        shard = dp // dp_replicate
        t_range, d_range, p_range = range(tp), range(dp), range(pp)
        lines = {
            "tp": [[world_rank(t, d, p) for t in t_range] for p in p_range for d in d_range],
            "dp": [[world_rank(t, d, p) for d in d_range] for p in p_range for t in t_range],
            "pp": [[world_rank(t, d, p) for p in p_range] for d in d_range for t in t_range],
            "model": [[world_rank(t, d, p) for p in p_range for t in t_range] for d in d_range],
            "dp_shard": [
                [world_rank(t, r * shard + i, p) for i in range(shard)]
                for p in p_range for r in range(dp_replicate) for t in t_range
            ],
            "dp_replicate": [
                [world_rank(t, r * shard + i, p) for r in range(dp_replicate)]
                for p in p_range for i in range(shard) for t in t_range
            ],
        }  # fmt: skip
        axes = {name: make_axis(name, groups, rank) for name, groups in lines.items()}
        for direction in ("pp_down", "pp_up"):
            axes[direction] = make_axis(direction, lines["pp"], rank, share=False)
        axes["world"] = make_axis("world", [list(range(size))], rank)
        waits = axes["world"].waits
        return cls(**{name: replace(axis, waits=waits) for name, axis in axes.items()})

    def pipeline_subaxis(self, name: str, coordinates: Sequence[Sequence[int]]) -> Axis:
        """An axis through some pipeline coordinates (tied embeddings: first and last; Chimera: the replicas of a
        stage).

        Collective over the world: every rank passes the same list of disjoint coordinate lists. A rank that is in
        none of them gets an axis of size 1. It has a communicator of its own even where it goes through all ranks: what
        travels on it is started at places that differ from rank to rank, so it keeps no order with anything else.
        """
        if self.world.size == 1:
            return Axis.single(name)
        tp, dp = self.tp.size, self.dp.size
        lists = [
            [t + tp * (d + dp * p) for p in line] for line in coordinates for d in range(dp) for t in range(tp)
        ]  # fmt: skip
        return replace(make_axis(name, lists, self.world.rank, share=False), waits=self.world.waits)

    def __str__(self) -> str:
        """`tp2 x pp4 x dp2`, axes of size 1 left out."""
        parts = [f"{axis.name}{axis.size}" for axis in (self.tp, self.pp, self.dp) if axis.size > 1]
        return " x ".join(parts) or "one process"


def make_axis(name: str, lists: Sequence[Sequence[int]], rank: int, *, share: bool = True) -> Axis:
    """Makes a process group for every list of ranks and returns the axis of the list that holds `rank`.

    Collective. Lists of one rank get no group; a list of all ranks shares the default group unless `share` is False.
    """
    mine = Axis.single(name, rank)
    for ranks in lists:
        if len(ranks) == 1:
            continue
        whole_world = len(ranks) == dist.get_world_size() and list(ranks) == sorted(ranks)
        group = dist.group.WORLD if whole_world and share else dist.new_group(list(ranks))
        if rank in ranks:
            mine = Axis(name, len(ranks), list(ranks).index(rank), tuple(ranks), group)
    return mine
