"""Bytes of weights, gradients, masters and moments on one rank, to the byte.

The bucket plan that a run lays its flat buffers by (`megalite.inventory.buckets`) is counted, padding included, so the
numbers equal what a run allocates (tests/unit/planner/test_model_states.py builds the real buffers).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from megalite.config import OPTIMIZER_SPECS, Config, rates_of
from megalite.inventory import (
    WORD_EMBEDDINGS,
    BucketPlan,
    BufferParameter,
    ElementBytes,
    MemoryPlan,
    Parameter,
    ParameterPlacement,
    Shape,
    given_plan,
    layer_of,
    plan_buckets,
    stage_parameters,
)
from megalite.planner.communication import held_parameters, shards_of
from megalite.planner.float8 import int8_bytes
from megalite.planner.step_bytes import step_numbers, tapped_numbers


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank."""

    weights: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    scratch: int = 0  # this and the next come and go inside a step (ZeRO 2 and 3)
    gathered: int = 0
    host: int = 0  # this and the next are off the device
    file: int = 0
    staging: int = 0  # on the host, of gradients and weights on their way
    temporary: int = 0  # while the optimizer steps

    def __add__(self, other: StateBytes) -> StateBytes:
        """Two stages of a rank, which are stepped one after the other: the rest adds up."""
        total = StateBytes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
        return replace(total, temporary=max(self.temporary, other.temporary))

    @property
    def held(self) -> int:
        """What lives on the device from step to step."""
        return self.weights + self.gradients + self.master + self.moments


@lru_cache
def state_bytes(
    config: Config,
    world_size: int,
    items: range,
    *,
    plan: MemoryPlan | None = None,
    num_stages: int,
    versions: int,
    num_gradients: int,
    on_cpu: bool,
) -> StateBytes:
    """Bytes of one stage on one rank.

    Args:
        plan: None: what flags say.
        items: what the stage holds, indices into [embedding, block 0, ..., head]. num_stages: of the whole pipeline.
        versions: weight versions alive at once. num_gradients: updates whose gradients are in memory at once.
        on_cpu: whether the ranks are CPU processes (the default bucket is smaller there).
    """
    plan = given_plan(config) if plan is None else plan
    named, sharded, total = _buffered(config, items), config.parallel.zero_stage == 3, StateBytes()
    if len(named) < sum(1 for _ in stage_parameters(config.model, items)):
        total = embedding_rows(config)
    several = config.num_microbatches(world_size) > 1
    for family, wide, frozen in dict.fromkeys(p.buffer for _, p in named):
        size, shards = ElementBytes.of(config), shards_of(config, world_size, family)
        size = ElementBytes(size.wide, size.wide, size.wide) if wide else size
        buckets = planned_buckets(config, items, num_stages, shards, on_cpu, (family, wide, frozen))
        part = _family_bytes(
            config, plan, buckets, size, shards, 1 if frozen else versions, num_gradients, on_cpu, several
        )
        if frozen and plan.hosts_params:
            part = StateBytes(host=sum(b.share if sharded else b.numel for b in buckets) * size.compute)
        elif frozen:
            held, come_and_go = int8_bytes(config, items, (family, wide)) or (part.weights, part.gathered)
            part = StateBytes(weights=held, gathered=come_and_go)
        scratch = max(total.scratch, part.scratch)  # of all families one after the other
        total = replace(total + part, scratch=scratch)
    one_stage = num_stages == 1 and config.model.shares_embedding
    if plan.hosts_params and one_stage:  # the embedding's is open throughout a backward
        total = replace(total, scratch=total.scratch // 3 * 4)
    return total


def _buffered(config: Config, items: range) -> list[tuple[str, Parameter]]:
    """(Name, parameter) of what is in flat buffers: all but rows that are on the host."""
    apart = WORD_EMBEDDINGS if config.optimizer.offload.embedding_offload is not None else None
    return [(name, parameter) for name, parameter in held_parameters(config, items) if name != apart]


def embedding_rows(config: Config) -> StateBytes:
    """Of `--embedding-offload`, on a rank of the first stage: the cache, with one more row of zeros, and on the host
    the rows, their moments and how many steps each has taken."""
    size, columns, moments = (
        ElementBytes.of(config),
        config.model.hidden_size,
        OPTIMIZER_SPECS[config.optimizer.optimizer],
    )
    of_element = size.wide + sum(size.wide if dtype == "fp32" else 2 for dtype in moments.moments(config.optimizer))
    cached, rows = (config.cached_rows + 1) * columns, config.embedding_rows
    return StateBytes(
        weights=cached * size.compute, gradients=cached * size.gradient, host=rows * (columns * of_element + 8)
    )


def _family_bytes(
    config: Config,
    plan: MemoryPlan,
    buckets: Sequence[PlannedBucket],
    size: ElementBytes,
    shards: int,
    versions: int,
    num_gradients: int,
    on_cpu: bool,
    several: bool = True,
) -> StateBytes:
    """Of the buffers of one family and dtype. shards: ranks over which ZeRO shards it. several: micro-batches."""
    zero = config.parallel.zero_stage
    numel = sum(bucket.numel for bucket in buckets)
    owned = sum(bucket.share for bucket in buckets)
    streamed = [bucket for bucket in buckets if zero >= 2 and not bucket.tied]
    held = sum(bucket.numel for bucket in buckets if zero < 2 or bucket.tied) * (num_gradients if zero < 2 else 1)
    held += sum(bucket.share for bucket in streamed)
    come_and_go = zero == 3 and shards > 1
    separate = size.compute != size.wide or versions > 1
    remainders = config.optimizer.store_param_remainders and size.compute != size.wide
    away, stepped = _stepped(config, plan, buckets, owned, size, on_cpu)
    if plan.hosts_params:
        masters = (owned - away) * size.wide if separate or not on_cpu else 0
        return stepped + _hosted(buckets, size, zero) + StateBytes(master=masters)
    # A gradient is copied to the host (and kept there for a delayed step), a weight on its way to the device is too.
    copies = away * (size.gradient + size.compute) if not on_cpu else 0
    delayed = config.optimizer.offload.delayed_parameter_update
    copies += away * size.gradient if on_cpu and delayed else 0
    largest = sorted((bucket.numel for bucket in buckets), reverse=True)
    partition = config.parallel.zero_plus_plus.zero_hpz_partition_size
    kept = numel // partition if partition > 1 else 0  # between a step's first gather and its update
    return stepped + StateBytes(
        weights=versions * (owned if come_and_go else numel) * size.compute,
        gradients=held * size.gradient,
        master=(owned - away) * (2 if remainders else size.wide) if separate else 0,
        scratch=_scratch(streamed, several) * size.gradient,
        gathered=(sum(largest[:2]) + kept) * size.compute if come_and_go else 0,
        staging=copies,
    )


def _scratch(streamed: Sequence[PlannedBucket], several: bool) -> int:
    """Elements of the pieces that gradients are reduced from: one that is filled and one in flight, beside what stays
    open. From the second micro-batch on that takes a piece as large as the others'."""
    others = [bucket.numel for bucket in streamed if not bucket.open]
    largest, open_ones = max(others, default=0), sum(bucket.numel for bucket in streamed if bucket.open)
    return min(2, len(others)) * largest + open_ones + (largest if several and 0 < open_ones < largest else 0)


def _hosted(buckets: Sequence[PlannedBucket], size: ElementBytes, zero: int) -> StateBytes:
    """Weights and gradients that live on the host: what stays on the device, what comes and goes, and the host."""
    tied = sum(bucket.numel for bucket in buckets if bucket.tied)
    others = [bucket for bucket in buckets if not bucket.tied]
    kept = [bucket.share if zero >= 2 else bucket.numel for bucket in others]
    matrices, vectors = Counter[str](), 0  # by layer; in all
    for entry in (range_.entry for bucket in others for range_ in bucket.plan.ranges):
        if entry.placement.decay:
            matrices[layer_of(entry.name)] += entry.numel
        else:
            vectors += entry.numel
    pieces = [bucket.numel for bucket in others] if zero >= 2 else list(matrices.values())
    weights = sum(bucket.share if zero == 3 else bucket.numel for bucket in buckets)
    return StateBytes(
        gradients=(tied + (vectors if zero < 2 else 0)) * size.gradient,
        scratch=3 * max(pieces, default=0) * size.gradient,
        host=weights * size.compute + sum(kept) * size.gradient,
    )


class PlannedBucket(NamedTuple):
    """A bucket, and what the owner with most of the family has of it."""

    plan: BucketPlan
    share: int  # elements of its slice
    elements: int  # that carry optimizer state
    matrix_state: int  # numbers that are kept for whole matrices
    statistics: int  # numbers that every owner keeps, whatever its slice (Adafactor)
    step: float  # numbers that come and go while it is stepped
    open: bool = False  # from the first to the last gradient of a backward: tied embeddings of one stage

    @property
    def numel(self) -> int:
        return self.plan.stop - self.plan.start

    @property
    def tied(self) -> bool:
        return self.plan.tied

    @property
    def whole(self) -> bool:
        return self.plan.segments[0].whole


def planned_buckets(
    config: Config, items: range, num_stages: int, shards: int, on_cpu: bool, of: tuple[str, bool, bool]
) -> list[PlannedBucket]:
    """Of the parameters of one family and width that are frozen or not, `of`."""
    model, parallel = config.model, config.parallel
    needs_whole, ep = OPTIMIZER_SPECS[config.optimizer.optimizer].whole, parallel.experts.expert_model_parallel_size
    zero = 0 if of[2] and parallel.zero_stage < 3 else parallel.zero_stage  # frozen: nothing but weights to share
    apart = model.shares_embedding and num_stages > 1 and not of[2]
    entries, rates = [], rates_of(config)
    own = [(name, parameter) for name, parameter in _buffered(config, items) if parameter.buffer == of]
    for index, (name, parameter) in enumerate(own):
        shape = parameter.local(parallel)
        whole = needs_whole is not None and needs_whole(name, len(shape))
        place = parameter.place(parameter.shards(parallel), sequence_parallel=parallel.sequence_parallel, ep=ep)
        entries.append(BufferParameter(index, name, shape, place, whole, rates(name, place.decay)))
    planned = _planned(config, entries, zero, shards, frozenset({WORD_EMBEDDINGS} if apart else ()), on_cpu)
    both = num_stages == 1 and model.shares_embedding
    return [bucket._replace(open=both and bucket.plan.layer == "embedding") for bucket in planned]


def _planned(
    config: Config, entries: Sequence[BufferParameter], zero: int, shards: int, tied: frozenset[str], on_cpu: bool
) -> list[PlannedBucket]:
    plans = plan_buckets(
        entries,
        zero_stage=zero,
        shards=shards,
        bucket_size=config.parallel.ddp_bucket_size,
        overlap=config.parallel.overlap_grad_reduce,
        on_cpu=on_cpu,
        tied=tied,
    )
    fullest = fullest_owner(config, plans)
    return [_bucket(config, plan, fullest, on_cpu) for plan in plans]


def fullest_owner(config: Config, plans: Sequence[BucketPlan]) -> int:
    """Which owner of a family keeps most for whole matrices."""
    kept: Counter[int] = Counter()  # owner -> masters, and what is kept for them
    for plan in plans:
        if plan.segments[0].whole:
            for owner, share in enumerate(plan.sizes):
                kept[owner] += share + _matrix_state(config, plan, owner)
    return max(kept, key=lambda owner: kept[owner], default=0)


def _matrix_state(config: Config, plan: BucketPlan, owner: int) -> int:
    """Numbers that an owner keeps for the matrices of its slice."""
    rule, entries = OPTIMIZER_SPECS[config.optimizer.optimizer], [s.ranges[0].entry for s in plan.segments_of(owner)]
    return sum(rule.of_whole(config.optimizer, entry.shape, entry.placement.global_shape) for entry in entries)


def named_state_bytes(
    config: Config,
    world_size: int,
    parameters: Sequence[tuple[str, Shape, ParameterPlacement]],
    *,
    plan: MemoryPlan,
    whole: Callable[[str, int], bool] | None,
    tied: frozenset[str],
    versions: int,
    num_gradients: int,
    on_cpu: bool,
) -> StateBytes:
    """Bytes of a stage of a model that is not ours, by (name, local shape, placement) of what learns in it. whole: of
    which the optimizer makes a matrix. The rest as `state_bytes` takes it."""
    entries = [
        BufferParameter(index, name, shape, place, whole is not None and whole(name, len(shape)))
        for index, (name, shape, place) in enumerate(parameters)
    ]
    shards = shards_of(config, world_size, "dense")
    buckets = _planned(config, entries, config.parallel.zero_stage, shards, tied, on_cpu)
    return _family_bytes(config, plan, buckets, ElementBytes.of(config), shards, versions, num_gradients, on_cpu)


def _bucket(config: Config, plan: BucketPlan, owner: int, on_cpu: bool) -> PlannedBucket:
    share, whole = plan.sizes[owner], plan.segments[0].whole
    own = sum(segment.ranges[0].entry.numel for segment in plan.segments_of(owner)) if whole else share
    statistics = sum(_statistics(range_.entry.shape, range_.entry.placement.decay) for range_ in plan.ranges)
    of_matrices = _matrix_state(config, plan, owner) + tapped_numbers(config, plan, owner) if whole else 0
    return PlannedBucket(plan, share, own, of_matrices, statistics, step_numbers(config, plan, owner, on_cpu=on_cpu))


def _statistics(shape: Shape, matrix: bool) -> int:
    """Numbers that Adafactor keeps of a parameter: a row and a column of a matrix."""
    numel = math.prod(shape)
    return numel // shape[-1] + numel // shape[-2] if matrix and len(shape) >= 2 else numel


def checkpoint_bytes(config: Config) -> int:
    """Bytes of the tensors of a checkpoint: masters and what the optimizer keeps, each logical element once. (2BW's
    older weights apart.)"""
    wide, rule = ElementBytes.of(config).wide, OPTIMIZER_SPECS[config.optimizer.optimizer]
    flat = sum(wide if dtype == "fp32" else 2 for dtype in rule.moments(config.optimizer))

    total = 0
    for name, parameter in stage_parameters(config.model, range(config.model.num_layers + 2)):
        if parameter.frozen:
            continue
        shape = parameter.shape
        state = wide if rule.whole is not None and rule.whole(name, len(shape)) else flat
        total += math.prod(shape) * (wide + state + wide * (config.optimizer.ema_decay is not None))
        total += wide * _statistics(shape, parameter.decay) if rule.statistics else 0
    return total


def _stepped(
    config: Config, plan: MemoryPlan, buckets: Sequence[PlannedBucket], owned: int, size: ElementBytes, on_cpu: bool
) -> tuple[int, StateBytes]:
    """(Elements whose masters and moments are off the device, the bytes of these there, of the moments that are left,
    and of what comes and goes in the step of those, on a CPU of all), as `parallel.zero` cuts them."""
    optimizer = config.optimizer
    rule = OPTIMIZER_SPECS[optimizer.optimizer]
    flat = sum(size.wide if dtype == "fp32" else 2 for dtype in rule.moments(optimizer))
    keeps_step = config.staleness.keeps_step
    shared = plan.hosts_params and size.compute == size.wide  # weights on the host are the masters
    moved, on_host, in_file, left, temporary = 0, 0, 0, 0, 0.0
    for bucket in buckets:
        share = bucket.share
        state = bucket.matrix_state * size.wide if bucket.whole else bucket.elements * flat
        if rule.statistics:
            state = bucket.statistics * size.wide
        keeps = keeps_step == "all" or (bucket.whole and keeps_step == "whole")
        state += bucket.elements * size.wide * (keeps + (optimizer.ema_decay is not None))
        to_file = moved < plan.file_fraction * owned and (on_cpu or not bucket.whole)
        if not to_file and (bucket.whole or moved >= plan.fraction * owned):
            left += state
            temporary = max(temporary, bucket.step)
            continue
        temporary = max(temporary, bucket.step * on_cpu)
        moved += share
        in_file += (share * size.wide + state) * to_file
        on_host += (share * size.wide * (not shared) + state) * (not to_file)
    if rule.statistics:  # the factors that are made of them, of all tensors at once
        temporary += sum(bucket.statistics for bucket in buckets)
    return moved, StateBytes(moments=left, host=on_host, file=in_file, temporary=round(temporary * size.wide))
