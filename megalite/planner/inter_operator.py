"""Which layers on which devices, where stages may differ: the dynamic programme of Alpa (Zheng et al. 2022,
arXiv:2201.12023) over contiguous layers and submeshes, with PipeDream's replicas (Narayanan et al. 2019,
arXiv:1806.03377).

    f(i, d) = least sum of passes of the layers i.. on d devices, every stage with a pace of at most t_max
            = min over k, submesh n  of  pass(i..k, n) + f(k, d - n)          time = f(0, D) + (m - 1) t_max

A stage's pass is what one micro-batch takes through it, its pace what it needs a micro-batch when all replicas are at
work, with its share of the gradients' reduction. t_max runs over the distinct paces in ascending order, until (m - 1)
t_max alone is no better than the best plan. Costs are compared relatively: they may be microseconds or years.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from math import inf
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


class StagePlan(NamedTuple):
    """seconds: of a batch."""

    seconds: float
    stages: tuple[PlannedStage, ...]


class _Choice(NamedTuple):
    """A stage that may come next. left: units of devices behind it."""

    pace: float
    latency: float
    left: int
    stage: PlannedStage


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
) -> StagePlan | None:
    """The fastest pipeline on exactly `devices` devices; None where nothing fits.

    meshes: that a stage may have. asynchronous: a pipeline that never drains pays the passes once a run, not in every
    batch. unit: devices are counted in so many; submeshes are multiples of it, and of paces that differ by less than a
    thousandth one is tried.
    """
    total, fill, tolerance = devices // unit, 0.0 if asynchronous else 1.0, 1e-3 if unit > 1 else 0.0

    def choices(begin: int, left: int) -> list[_Choice]:
        """Those of the quickest pace first."""
        found = []
        for mesh in meshes:
            rest = left - mesh.size // unit
            for end in range(begin + 1, layers + 1) if rest >= 0 else ():
                one = cost(begin, end, mesh, left * unit) if (rest == 0) == (end == layers) else None
                found += [_Choice(one.pace, one.latency, rest, PlannedStage(begin, end, mesh))] if one else []
        return sorted(found)

    starts = [(begin, left) for begin in reversed(range(layers)) for left in range(1 if begin else total, total + 1)]
    table = {start: choices(*start) for start in starts}

    def least_sum(pace: float) -> tuple[_Choice, ...]:
        """The stages with the least sum of passes, none slower than `pace`; none if there are none."""
        best: dict[tuple[int, int], tuple[float, tuple[_Choice, ...]]] = {(layers, 0): (0.0, ())}
        for start, found in table.items():
            for one in found[: bisect_right(found, pace, key=lambda one: one.pace)]:
                latency, behind = best.get((one.stage.end, one.left), (inf, ()))
                if one.latency + latency < best.get(start, (inf,))[0]:
                    best[start] = one.latency + latency, (one, *behind)
        return best.get((0, total), (inf, ()))[1]

    paces = sorted({one.pace for found in table.values() for one in found})
    best, tried = StagePlan(inf, ()), 0.0
    for pace in paces[bisect_left(paces, True, key=lambda pace: bool(least_sum(pace))) :]:
        if pace < tried * (1 + tolerance):
            continue
        if (microbatches - 1) * pace >= best.seconds:
            break
        tried, chosen = pace, least_sum(pace)
        slowest = max(one.pace for one in chosen)
        seconds = fill * sum(one.latency for one in chosen) + (microbatches - fill) * slowest
        best = min(best, StagePlan(seconds, tuple(one.stage for one in chosen)), key=lambda plan: plan.seconds)
    return best if best.stages else None
