"""Other layouts for the same small configuration: the one that its checkpoint is taken to, and the plain one that it is
compared with in the user's number format."""

from dataclasses import replace
from itertools import product
from typing import Any

from megalite.config import Config, ModelConfig, ParallelConfig, config_problems
from megalite.proof.reference import endless_program
from megalite.proof.shrink import Small


def elsewhere(small: Small) -> tuple[Config, int]:
    """Another layout for the same model and batch, as unlike as four ranks allow: where the checkpoint is taken to."""
    here = small.config.parallel
    count = Config.microbatches_together if small.by_microbatch else Config.data_parallel_size
    dp = count(small.config, small.world_size)
    delays = endless_program(small.config).staleness if small.by_microbatch else ()
    best: tuple[int, Config, int] | None = None
    for tp, pp, new_dp, zero in product((1, 2), (1, 2, 4), (1, 2, 4), (0, 1, 2, 3)):
        ranks = tp * pp * new_dp
        if small.by_microbatch:
            pp, new_dp, zero = here.pipeline_model_parallel_size, dp, 0
            ranks = tp * pp * dp
        elif ranks > 4:
            continue
        parallel = ParallelConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            sequence_parallel=tp > 1 and not here.sequence_parallel,
            zero_stage=zero,
            **_kept(small),
        )
        config = replace(small.config, parallel=parallel, model=nothing_recomputed(small.config))
        if config_problems(config, ranks) or (small.by_microbatch and endless_program(config).staleness != delays):
            continue
        before = (here.tensor_model_parallel_size, here.pipeline_model_parallel_size, dp, here.zero_stage)
        unlike = sum(a != b for a, b in zip(before, (tp, pp, new_dp, zero), strict=True))
        if best is None or unlike > best[0]:
            best = unlike, config, ranks
    if best is None:
        return small.config, small.world_size
    return best[1], best[2]


def plain(small: Small, own: Config) -> tuple[Config, int]:
    """`own` at the layout with the fewest ranks that makes the same updates: one, or the pipeline of PipeDream, whose
    delays are those of its stages and whose update is one micro-batch of every replica."""
    parallel = ParallelConfig(**_kept(small), grad_reduce_in_bf16=own.parallel.grad_reduce_in_bf16)
    config = replace(own, parallel=parallel, model=replace(nothing_recomputed(own), cpu_offloading_num_layers=0))
    if not small.by_microbatch:
        return config, 1
    stages = small.config.parallel.pipeline_model_parallel_size
    replicas = small.config.microbatches_together(small.world_size)
    wider = replace(own.training, micro_batch_size=own.training.micro_batch_size * replicas)
    together = replace(config, parallel=replace(parallel, pipeline_model_parallel_size=stages), training=wider)
    if endless_program(together).staleness != endless_program(small.config).staleness:
        return own, small.world_size
    # a micro-batch of all replicas' samples has their mean loss if none is masked, none shares a capacity or a scale
    alike = not (own.data.eod_mask_loss or own.model.experts.num_experts or own.training.float8.fp8_format)
    if alike and not config_problems(together, stages):
        return together, stages
    return replace(together, training=own.training), stages * replicas


def nothing_recomputed(config: Config) -> ModelConfig:
    """Its model: recomputation is written for the layout's stages."""
    return replace(config.model, recompute_granularity=None, recompute_method=None, recompute_num_layers=None)


def _kept(small: Small) -> dict[str, Any]:
    """What makes a layout's updates what they are."""
    here = small.config.parallel
    kept: dict[str, Any] = {"hardware": here.hardware, "distributed_timeout_minutes": here.distributed_timeout_minutes}
    if small.stale:
        kept |= {"pipeline_schedule": here.pipeline_schedule, "pipeline_flush_steps": here.pipeline_flush_steps}
    if small.by_microbatch:
        kept |= {"stage_layout": here.stage_layout, "pipedream_vertical_sync": here.pipedream_vertical_sync}
    return kept
