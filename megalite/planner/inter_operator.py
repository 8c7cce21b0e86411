"""Which layers on which devices, where stages may differ: the dynamic programme of Alpa (Zheng et al. 2022,
arXiv:2201.12023) over contiguous layers and submeshes, with PipeDream's replicas (Narayanan et al. 2019,
arXiv:1806.03377).

    f(i, d) = least sum of passes of the layers i.. on d devices, every stage with a pace of at most t_max
            = min over k, submesh n  of  pass(i..k, n) + f(k, d - n)          time = f(0, D) + (m - 1) t_max

A stage's pass is what one micro-batch takes through it, its pace what it needs a micro-batch when all replicas are at
work, with its share of the gradients' reduction. t_max runs over the distinct paces in ascending order, until (m - 1)
t_max alone is no better than the best plan. Costs are compared relatively: they may be microseconds or years.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.config import StageMesh


class StageCost(NamedTuple):
    """Seconds of one micro-batch through a stage, and seconds between two that leave it."""

    latency: float
    pace: float


class PlannedStage(NamedTuple):
    """Layers `begin .. end` on a submesh."""

    begin: int
    end: int
    mesh: StageMesh


@dataclass(frozen=True)
class StagePlan:
    """seconds: of a batch."""

    seconds: float
    stages: tuple[PlannedStage, ...]


Cost = Callable[[int, int, StageMesh, int], StageCost | None]
"""(First layer, last and one, submesh, devices from this stage on) -> its cost; None: it does not fit. The devices
bound the micro-batches in flight."""


def plan_stages(
    layers: int,
    devices: int,
    meshes: Sequence[StageMesh],
    cost: Cost,
    microbatches: int,
    *,
    asynchronous: bool = False,
    unit: int = 1,
    tolerance: float = 0.0,
) -> StagePlan | None:
    """The fastest pipeline on exactly `devices` devices; None where nothing fits.

    meshes: that a stage may have. asynchronous: a pipeline that never drains pays the passes once a run, not in every
    batch. unit: devices are counted in so many; sizes of submeshes are multiples of it.
    tolerance: of paces that differ by less than this part one is tried.
    """
    total, sizes = devices // unit, [mesh.size // unit for mesh in meshes]
    table = {
        (begin, end, number, left): found
        for begin in range(layers)
        for end in range(begin + 1, layers + 1)
        for number, size in enumerate(sizes)
        for left in range(size, total + 1)
        if (begin > 0 or left == total)
        and (end < layers or left == size)
        and (found := cost(begin, end, meshes[number], left * unit)) is not None
    }
    fill = 0.0 if asynchronous else 1.0
    paces = sorted({found.pace for found in table.values()})
    best: StagePlan | None = None
    first = bisect_left(paces, True, key=lambda pace: _least_sum(layers, total, sizes, table, pace) is not None)
    tried = 0.0
    for pace in paces[first:]:
        if pace < tried * (1 + tolerance):
            continue
        tried = pace
        if best is not None and (microbatches - 1) * pace >= best.seconds:
            break
        stages = _least_sum(layers, total, sizes, table, pace)
        if stages is None:
            continue
        chosen = [table[stage] for stage in stages]
        slowest = max(one.pace for one in chosen)
        seconds = fill * sum(one.latency for one in chosen) + (microbatches - fill) * slowest
        if best is None or seconds < best.seconds:
            planned = tuple(PlannedStage(begin, end, meshes[number]) for begin, end, number, _ in stages)
            best = StagePlan(seconds, planned)
    return best


_Key = tuple[int, int, int, int]


def _least_sum(
    layers: int, total: int, sizes: Sequence[int], table: dict[_Key, StageCost], pace: float
) -> list[_Key] | None:
    """The stages with the least sum of passes, none slower than `pace`."""
    least: dict[tuple[int, int], float] = {(layers, 0): 0.0}
    choice: dict[tuple[int, int], _Key] = {}
    for begin in range(layers - 1, -1, -1):
        for left in range(1, total + 1) if begin else (total,):
            found, best = math.inf, None
            for end in range(begin + 1, layers + 1):
                for number, size in enumerate(sizes):
                    behind = least.get((end, left - size))
                    one = None if behind is None else table.get((begin, end, number, left))
                    if one is not None and behind is not None and one.pace <= pace and one.latency + behind < found:
                        found, best = one.latency + behind, (begin, end, number, left)
            if best is not None:
                least[begin, left], choice[begin, left] = found, best
    if (0, total) not in choice:
        return None
    stages, place = [], (0, total)
    while place[0] < layers:
        stage = choice[place]
        stages.append(stage)
        place = stage[1], place[1] - sizes[stage[2]]
    return stages
