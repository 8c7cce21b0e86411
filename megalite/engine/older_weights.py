"""The weight versions before the newest, which an asynchronous schedule still needs, in checkpoints.

    `previous/<name>`     compute weights of one update ago (2BW, PipeDream)
    `previous/N/<name>`   of N updates ago (PipeDream)

A layout that keeps fewer versions has saved fewer; what is missing is a copy of the next newer version.
"""

from __future__ import annotations

from collections.abc import Iterator

from megalite.comm import TensorShard
from megalite.engine.weights import Weights

OLDER = "previous/"


def older_shards(weights: Weights, version: int) -> list[TensorShard]:
    """All versions before `version` that this rank keeps, the newest first (views)."""
    return [shard for _, shards in _older_versions(weights, version) for shard in shards]


def complete_older(weights: Weights, version: int, loaded: set[str]) -> bool:
    """Makes older versions of which nothing was loaded copies of the next newer one; where none was, of the masters.

    loaded: names of the shards that were. Returns whether anything was missing.
    """
    missing, newer = False, _compute_weights(weights, version)
    for old, older in _older_versions(weights, version):
        missing = missing or any(shard.name not in loaded for shard in older)
        if not loaded:
            weights.optimizer.write_weights(old, as_masters=True)
            for state in weights.states:
                state.copy(version, old)
            continue
        for shard, next_newer in zip(older, newer, strict=True):
            if shard.name not in loaded:
                shard.local.copy_(next_newer.local)
        for family in (family for family in weights.optimizer.buffers if not family.frozen):
            family.weights.gather(old)
        for state in weights.states:
            state.after_load(old)
        newer = older
    return missing


def _older_versions(weights: Weights, version: int) -> Iterator[tuple[int, list[TensorShard]]]:
    for ago in range(1, weights.num_versions):
        prefix = OLDER if ago == 1 else f"{OLDER}{ago}/"
        yield version - ago, _compute_weights(weights, version - ago, prefix)


def _compute_weights(weights: Weights, version: int, prefix: str = "") -> list[TensorShard]:
    states = [shard for state in weights.states for shard in state.shards(version, prefix)]
    return [*weights.optimizer.version_shards(version, prefix), *states]
