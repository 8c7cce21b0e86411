"""Which ranks are rehearsed: of each kind one, and along each axis two, so that what they exchange has two ends.

Ranks of a stage that differ along an axis do the same, the first of the axis apart: it counts losses, writes, draws.
"""

from megalite.comm import ParallelMesh
from megalite.rehearsal.rank import Rehearsed
from megalite.train import mesh_on_meta

MOST = 16
"""Ranks of a world that are all rehearsed."""
VIEWS = (("tp", "cp_heads", "cp_ring", "dp_shard", "dp_replicate"), ("etp", "ep", "edp_shard", "edp_replicate"))


def mesh_of(run: Rehearsed, rank: int = 0) -> ParallelMesh:
    """The grid, for arithmetic."""
    return mesh_on_meta(run.config.parallel, run.size, rank)


def distinct_ranks(run: Rehearsed) -> tuple[list[int], list[int]]:
    """(Those that are rehearsed, two more of the kind of each, which must do what it does). Of a small world all; else
    of every stage the first rank, and of the first, second and last stage the last of each axis and of all."""
    mesh = mesh_of(run)
    if run.size <= MOST or mesh.takes_turns:
        return list(range(run.size)), []
    stages, axes = mesh.size("pp"), _axes(mesh)
    inside = run.size // stages
    chosen, more = {0, inside - 1, *((size - 1) * stride for stride, size in axes)}, set[int]()
    for kind in {_place(axes, rank) for rank in chosen}:
        others = [rank for rank in range(inside) if rank not in chosen and _place(axes, rank) == kind]
        more |= {others[0], others[len(others) // 2]} if others else set()
    kinds = sorted({0, min(1, stages - 1), stages - 1})
    of_stage = [sorted(chosen) if stage in kinds else [0] for stage in range(stages)]
    distinct = [stage * inside + rank for stage, ranks in enumerate(of_stage) for rank in ranks]
    return distinct, [stage * inside + rank for stage in kinds for rank in sorted(more)]


def class_of(run: Rehearsed, rank: int) -> tuple[int, tuple[bool, ...]]:
    """(Place on the pipeline, on which of the other axes it is not the first)."""
    mesh = mesh_of(run)
    if mesh.takes_turns:
        return rank, ()
    inside = run.size // mesh.size("pp")
    return rank // inside, _place(_axes(mesh), rank % inside)


def _axes(mesh: ParallelMesh) -> list[tuple[int, int]]:
    """(Ranks from one member to the next, members) of each axis of a stage."""
    found = []
    for view in VIEWS:
        stride = 1
        for axis in view:
            found.append((stride, mesh.size(axis)))
            stride *= mesh.size(axis)
    return found


def _place(axes: list[tuple[int, int]], rank: int) -> tuple[bool, ...]:
    return tuple(rank // stride % size > 0 for stride, size in axes)
