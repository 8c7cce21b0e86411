"""What stages that differ are worth, in words, and the flags that run them (`tools/plan.py --stages-may-differ`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megalite.config import Config
from megalite.planner import DeviceClass, Prediction, best_unlike

WORTH_IT = 1.03
"""Stages that differ are named as the better choice where a batch is so much faster."""


def unlike_lines(alike: Prediction, cluster: Sequence[DeviceClass], stale: bool) -> Iterator[str]:
    """What stages that differ are worth beside the best layout whose stages are alike, and the flags to paste."""
    found = best_unlike(alike.config, cluster, stale=stale)
    if found is None:
        yield "stages that differ: none of several stages fits and beats a single one; plain replicas do as well"
        return
    ratio = alike.step_time / found.seconds
    yield f"stages that differ: {found.seconds:.4g} s a batch, {ratio:.2f} x the speed of the best layout of equal ones"
    rank = 0
    yield f"  layers {found.config.parallel.stage_layout.pipeline_model_parallel_layout}"
    for number, stage in enumerate(found.stages.stages):
        ranks = f"ranks {rank} to {rank + stage.mesh.size - 1}"
        kind = cluster[found.kinds[number]].hardware.name if len(cluster) > 1 else ""
        yield f"  stage {number}: tp {stage.mesh.tp} x {stage.mesh.dp} replicas, {ranks}{kind and ' of ' + kind}"
        rank += stage.mesh.size
    if len({stage.mesh for stage in found.stages.stages}) == 1:
        yield "  its stages are alike after all: plain replicas and an uneven cut do as well"
    elif ratio < 1:
        yield "  that is slower: plain replicas or an uneven cut do better"
    elif ratio < WORTH_IT:
        yield "  that is within the error of the plan: plain replicas or an uneven cut do as well"
    yield f"  to run it, add: {flags_of(found.config)}"


def flags_of(config: Config) -> str:
    """What makes a layout of stages that differ, to be pasted behind a launch."""
    parallel, training = config.parallel, config.training
    return (
        f"--stage-meshes {parallel.stage_meshes} --pipeline-schedule {parallel.schedule} "
        f"--pipeline-model-parallel-layout '{parallel.stage_layout.pipeline_model_parallel_layout}' "
        f"--micro-batch-size {training.micro_batch_size} --global-batch-size {training.global_batch_size} "
        f"--zero-stage {parallel.zero_stage}{' --sequence-parallel' if parallel.sequence_parallel else ''}"
    )
