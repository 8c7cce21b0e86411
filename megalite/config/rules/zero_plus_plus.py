"""Rules of ZeRO++."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.root import Config


def zero_plus_plus(config: Config, world_size: int) -> Iterator[str]:
    """There are weights to gather, over ranks that come in whole partitions."""
    parallel, given = config.parallel, config.parallel.zero_plus_plus
    if not given.on:
        return
    size = given.zero_hpz_partition_size
    flags = {
        "`zero_quantized_weights`": given.zero_quantized_weights,
        "`zero_quantized_gradients`": given.zero_quantized_gradients,
        f"`zero_hpz_partition_size`={size}": size > 1,
    }
    flag = next(name for name, on in flags.items() if on)
    if parallel.zero_stage != 3:
        yield f"{flag}: needs `zero_stage`=3, whose weights are gathered; it is {parallel.zero_stage}"
        return
    if config.optimizer.offload.param_offload == "cpu":
        yield f"{flag}: not with `param_offload`=cpu, whose weights come from the host; drop one"
    if config.gathers_float8 and given.changes_gathers:
        yield f"{flag}: not with `fp8_param_gather`, whose weights travel in 8 bits already; drop one"
    if parallel.meshes or world_size % parallel.model_parallel_size:
        return
    shards = config.gradient_ranks(world_size) // parallel.num_distributed_optimizer_instances
    if shards < 2:
        yield f"{flag}: one rank holds all weights of a stage, so nothing travels; leave it out, or add ranks"
    elif shards % size:
        yield (
            f"`zero_hpz_partition_size`={size}: does not divide the {shards} ranks over which weights are sharded; use "
            f"{next(n for n in range(min(size, shards), 0, -1) if shards % n == 0)}"
        )
    elif size > 1 and config.model.experts.num_experts is not None:
        yield f"`zero_hpz_partition_size`={size}: not with `num_experts`, which are sharded over other ranks; drop one"
