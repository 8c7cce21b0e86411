"""Which ranks are rehearsed: of each kind one, and along each axis two, so that what they exchange has two ends.

Ranks of a stage that differ along an axis do the same, the first of the axis apart: it counts losses, writes, draws.
"""

from __future__ import annotations

import torch

from megalite.comm import ParallelMesh, World
from megalite.rehearsal.rank import Rehearsed
from megalite.train import make_mesh

MOST = 16
"""Ranks of a world that are all rehearsed."""
VIEWS = (("tp", "cp_heads", "cp_ring", "dp_shard", "dp_replicate"), ("etp", "ep", "edp_shard", "edp_replicate"))


def mesh_of(run: Rehearsed, rank: int = 0) -> ParallelMesh:
    """The grid, for arithmetic."""
    return make_mesh(run.config.parallel, World(rank, run.size, torch.device("meta"), local_size=run.size))


def distinct_ranks(run: Rehearsed) -> list[int]:
    """Of a small world all. Else of every pipeline rank the first of all other axes; and of one for each kind of
    stages, for each axis the last of it, and the last of all."""
    mesh = mesh_of(run)
    if run.size <= MOST or mesh.takes_turns:
        return list(range(run.size))
    inside, firsts = _stages(run, mesh)
    chosen = _chosen(mesh, inside)
    stages = range(0, run.size, inside)
    return [first + rank for first in stages for rank in (chosen if first in firsts else [0])]


def more_members(run: Rehearsed) -> list[int]:
    """Two more ranks of the kind of each, which must do what it does."""
    mesh = mesh_of(run)
    if run.size <= MOST or mesh.takes_turns:
        return []
    inside, firsts = _stages(run, mesh)
    chosen, more = _chosen(mesh, inside), set[int]()
    for kind in {_place(mesh, rank) for rank in chosen}:
        others = [rank for rank in range(inside) if rank not in chosen and _place(mesh, rank) == kind]
        more |= {others[0], others[len(others) // 2]} if others else set()
    return [first + rank for first in firsts for rank in sorted(more)]


def class_of(run: Rehearsed, rank: int) -> tuple[int, tuple[bool, ...]]:
    """(Place on the pipeline, on which of the other axes it is not the first)."""
    mesh = mesh_of(run)
    if mesh.takes_turns:
        return rank, ()
    inside = run.size // mesh.size("pp")
    return rank // inside, _place(mesh, rank % inside)


def _place(mesh: ParallelMesh, rank: int) -> tuple[bool, ...]:
    found = []
    for view in VIEWS:
        rest = rank
        for axis in view:
            rest, coordinate = divmod(rest, mesh.size(axis))
            found.append(coordinate > 0)
    return tuple(found)


def _stages(run: Rehearsed, mesh: ParallelMesh) -> tuple[int, list[int]]:
    """(Ranks of a stage; the first rank of one stage of each kind: the ends, and one between them)."""
    stages = mesh.size("pp")
    inside = run.size // stages
    return inside, [stage * inside for stage in sorted({0, min(1, stages - 1), stages - 1})]


def _chosen(mesh: ParallelMesh, inside: int) -> list[int]:
    """Of a stage the first rank of all axes, for each axis its last, and the last of all."""
    chosen = {0, inside - 1}
    for view in VIEWS:
        stride = 1
        for axis in view:
            chosen.add((mesh.size(axis) - 1) * stride)
            stride *= mesh.size(axis)
    return sorted(chosen)
