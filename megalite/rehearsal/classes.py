"""Which ranks are rehearsed: of each kind one, and along each axis two, so that what they exchange has two ends.

Ranks of a stage that differ along an axis do the same, the first of the axis apart: it counts losses, writes, draws.
"""

from __future__ import annotations

import torch

from megalite.comm import ParallelMesh, World
from megalite.config import Config
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
    stages = mesh.size("pp")
    inside = run.size // stages
    chosen = {0, inside - 1}
    for view in VIEWS:
        stride = 1
        for axis in view:
            chosen.add((mesh.size(axis) - 1) * stride)
            stride *= mesh.size(axis)
    kinds = [_kind(run.config, stage, stages) for stage in range(stages)]
    firsts = {kinds.index(kind) for kind in kinds}
    return [stage * inside + rank for stage in range(stages) for rank in (sorted(chosen) if stage in firsts else [0])]


def _kind(config: Config, stage: int, stages: int) -> tuple[bool, bool]:
    """What tells the stages of a rank from those of another, beside their layers, which each runs: its ends."""
    return stage == 0, stage == stages - 1
