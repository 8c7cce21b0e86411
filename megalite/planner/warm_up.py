"""Bytes that blocks have needed before they became CUDA graphs, and that no graph can have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megalite.config import Config
from megalite.inventory import GRAPH_WARM_UP, Recompute
from megalite.planner.activations import StageActivations, stage_activations, workspace_bytes


def warm_up_bytes(
    config: Config,
    cuts: Sequence[range],
    how: Mapping[int, Recompute],
    kept: Mapping[int, StageActivations],
    most: float,
) -> float:
    """What micro-batches before the first CUDA graph had and torch's allocator keeps, for everything but graphs: their
    activations, and what came and went in a block's backward. Whatever comes and goes later finds its place there.

    how, kept: of the stages of a rank. most: activations that it has with graphs, at most.
    """
    if config.parallel.hardware.cuda_graph_impl == "none":
        return 0.0
    hardware = replace(config.parallel.hardware, cuda_graph_impl="none")
    eager = replace(config, parallel=replace(config.parallel, hardware=hardware))
    in_flight = -(-most // sum(each.full for each in kept.values()))  # of each stage
    count = min(GRAPH_WARM_UP, in_flight)
    activations = sum(count * stage_activations(eager, cuts[stage], each).full for stage, each in how.items())
    return activations + max(workspace_bytes(eager, cuts[stage], each)[1] for stage, each in how.items())
