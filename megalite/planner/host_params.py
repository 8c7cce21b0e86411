"""Weights that live on the host (`--param-offload`): bytes of each layer, and the order in which a stage reads them.

The run follows what `schedule.plan_chunks` makes of it, and the planner prices the same
(tests/unit/planner/test_host_params.py compares the bytes with those of real buffers).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from megalite.config import Config
from megalite.inventory import (
    ElementBytes,
    MemoryPlan,
    Recompute,
    align,
    layer_name,
    layer_of,
    recompute_ranges,
    stage_parameters,
)
from megalite.planner.communication import held_parameters, shards_of
from megalite.planner.model_states import planned_buckets
from megalite.schedule import WeightChunks


def with_weight_chunks(config: Config, world_size: int, cuts: Sequence[range], plan: MemoryPlan) -> MemoryPlan:
    """The plan with what comes and goes in these stages, where weights live on the host. cuts: stage -> indices into
    [embedding, block 0, ..., head]."""
    if not plan.hosts_params:
        return plan
    orders = [_orders(config, cut, plan.recompute_of(stage)) for stage, cut in enumerate(cuts)]
    capacity = None if plan.chunks is None else plan.chunks.capacity
    again = config.num_microbatches(world_size) > 1 and config.parallel.zero_stage < 2
    sent = [_gradient_bytes(config, world_size, cut) for cut in cuts]
    chunks = WeightChunks(
        tuple(_layer_bytes(config, world_size, cut, len(cuts)) for cut in cuts),
        tuple(forward for forward, _ in orders),
        tuple(backward for _, backward in orders),
        tuple((nbytes, nbytes if again else 0) for nbytes in sent),
        capacity,
    )
    return replace(plan, chunks=chunks)


def _layer_bytes(config: Config, world_size: int, cut: range, num_stages: int) -> tuple[int, ...]:
    """Of the weights of each layer of a stage on the device: parameters begin at multiples of the alignment."""
    size, found = ElementBytes.of(config), defaultdict[str, int](int)
    own, names = held_parameters(config, cut), [layer_name(item, config.model.num_layers) for item in cut]
    for kind in dict.fromkeys(parameter.buffer for _, parameter in own):
        family, wide, _ = kind
        shards = shards_of(config, world_size, family)
        numel = defaultdict[str, int](int)
        if config.parallel.zero_stage == 3 and shards > 1:  # whole buckets come
            for bucket in planned_buckets(config, cut, num_stages, shards, True, kind):
                numel[bucket.plan.layer] += bucket.numel
        else:
            for name, parameter in own:
                if parameter.buffer == kind:
                    numel[layer_of(name)] += align(math.prod(parameter.local(config.parallel)))
        for layer, elements in numel.items():  # an embedding that another stage has too is the head's
            found[layer if layer in names else "head"] += elements * (size.wide if wide else size.compute)
    return tuple(found[name] for name in names)


def _gradient_bytes(config: Config, world_size: int, cut: range) -> int:
    """What a backward of a stage sends to the host: of all its matrices, or from ZeRO-2 on of this rank's slices."""
    total, size = 0.0, ElementBytes.of(config)
    for parameter in (parameter for _, parameter in stage_parameters(config.model, cut) if not parameter.frozen):
        shards = shards_of(config, world_size, parameter.family)
        nbytes = math.prod(parameter.local(config.parallel)) * (size.wide if parameter.wide else size.gradient)
        total += nbytes / (shards if config.parallel.zero_stage >= 2 else 1)
    return round(total)


Uses = tuple[tuple[int, ...], ...]


def _orders(config: Config, cut: range, how: Recompute) -> tuple[Uses, Uses]:
    """(Layers whose weights each step of a forward reads, and of a backward)."""
    names = [layer_name(item, config.model.num_layers) for item in cut]
    tied = config.model.shares_embedding and {"embedding", "head"} <= set(names)
    reads = [(i, 0) if tied and name == "head" else (i,) for i, name in enumerate(names)]
    blocks = [i for i, name in enumerate(names) if name not in ("embedding", "head")]
    backward: list[tuple[int, ...]] = []
    for begin, end, again in reversed(recompute_ranges(len(names), blocks, how)):
        if again:
            backward += [reads[end - 1], *reads[begin:end]]
        backward += reversed(reads[begin:end])
    if config.model.adapted_parts and names[0] == "embedding":  # nothing in front of the first adapter has a backward
        backward.pop()
    return tuple(reads), tuple(backward)
