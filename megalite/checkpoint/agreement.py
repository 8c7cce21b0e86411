"""Do the ranks' plans add up to one load? Decided on every rank from what all have said (`Checkpointer.load`)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from megalite.checkpoint.format import Manifest
from megalite.checkpoint.loading import STATE_PREFIXES, RankLoad
from megalite.checkpoint.saving import raise_first
from megalite.errors import CheckpointError

logger = logging.getLogger(__name__)


def agree_on_load(mine: RankLoad, plans: Sequence[tuple[str | None, str, str]], *, speaks: bool) -> Manifest:
    """Raises CheckpointError, on all ranks alike, where the ranks' plans do not add up to one load. plans: problem,
    save id and mask of each."""
    raise_first([problem for problem, _, _ in plans])
    assert mine.manifest is not None
    if any(save_id != plans[0][1] for _, save_id, _ in plans):
        raise CheckpointError(
            f"{mine.path}: the ranks see different checkpoints; is the directory shared by all hosts?"
        )
    unused = unused_names(mine.manifest, [mask for _, _, mask in plans])
    weights = [name for name in unused if not name.startswith(STATE_PREFIXES)]
    if weights:
        more = f" (and {len(weights) - 3} more)" if len(weights) > 3 else ""
        raise CheckpointError(f"{mine.path}: holds weights that this model lacks: {', '.join(weights[:3])}{more}")
    if unused and speaks:
        logger.info("%s: %d state tensors were not asked for and not loaded", mine.path, len(unused))
    return mine.manifest


def unused_names(manifest: Manifest, masks: Collection[str]) -> list[str]:
    """Stored tensors that no rank asked for, by what `names_mask` said on each."""
    used = 0
    for mask in masks:
        used |= int(mask, 16)
    bits = f"{used:0{len(manifest.tensors)}b}"
    return [name for name, bit in zip(manifest.tensors, bits, strict=False) if bit == "0"]
