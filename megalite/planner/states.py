"""Bytes of weights, gradients, masters and moments on one rank, to the byte.

The arithmetic of the flat buffers (`megalite.parallel.zero`) without a tensor: parameters lie one after the other in
buckets, each begins at a multiple of 64 elements, and a bucket is a multiple of 64 times the shards. So the numbers
hold the padding too, and equal what a run allocates (tests/unit/planner/test_states.py builds the real buffers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from megalite.config import Config
from megalite.config.arithmetic import layer_shapes, parameter_shapes
from megalite.config.model import ModelConfig

__all__ = [
    "Precision",
    "StateBytes",
    "StageParameter",
    "default_bucket_size",
    "stage_elements",
    "stage_parameters",
    "state_bytes",
]

ALIGNMENT = 64
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
COLUMN_CUT = ("attention.qkv.weight", "attention.qkv.bias", "mlp.fc1.weight", "mlp.fc1.bias")
ROW_CUT = ("attention.proj.weight", "mlp.fc2.weight")


class Precision(NamedTuple):
    """Bytes of an element: compute weights and activations, masters and losses, accumulated gradients."""

    compute: int
    wide: int
    gradient: int

    @classmethod
    def of(cls, config: Config) -> Precision:
        training = config.training
        half = training.bf16 or training.fp16
        compute, wide = (8, 8) if training.fp64 else (2, 4) if half else (4, 4)
        return cls(compute, wide, 2 if training.bf16 and config.parallel.grad_reduce_in_bf16 else wide)


class StageParameter(NamedTuple):
    """A parameter as one tensor-parallel rank holds it. matrix: two or more dimensions inside a layer. statistics:
    numbers that Adafactor keeps of it."""

    name: str
    numel: int
    tied: bool
    matrix: bool
    statistics: int


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank. scratch and gathered come and go inside a step (ZeRO stages 2 and 3), host is off the
    device."""

    weights: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    scratch: int = 0
    gathered: int = 0
    host: int = 0

    def __add__(self, other: StateBytes) -> StateBytes:
        """Two stages of a rank: their states add up, and so does what each may hold for a moment."""
        names = ("weights", "gradients", "master", "moments", "scratch", "gathered", "host")
        return StateBytes(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def held(self) -> int:
        """What lives on the device from step to step."""
        return self.weights + self.gradients + self.master + self.moments


def stage_parameters(config: Config, items: range, num_stages: int) -> list[StageParameter]:
    """The parameters of a stage in forward order. items: indices into [embedding, block 0, ..., head]."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    layers = model.num_layers
    tied_head = not model.untie_embeddings_and_output_weights and layers + 1 in items
    shapes = _shapes(model, items)
    names = [name for name in shapes if _item_of(name, layers) in items]
    if tied_head and 0 not in items:
        names.append(WORD_EMBEDDINGS)
    apart = not model.untie_embeddings_and_output_weights and num_stages > 1
    rows = config.padded_vocab_size() // tp
    result = []
    for name in names:
        shape = _local_shape(name, shapes[name], rows, tp)
        numel = math.prod(shape)
        matrix = name.startswith("layers.") and len(shape) >= 2
        factored = len(shape) >= 2 and not name.endswith("bias")
        statistics = numel // shape[-1] + numel // shape[-2] if factored else numel
        result.append(StageParameter(name, numel, apart and name == WORD_EMBEDDINGS, matrix, statistics))
    return result


def _local_shape(name: str, shape: tuple[int, ...], rows: int, tp: int) -> tuple[int, ...]:
    """What a tensor-parallel rank holds; rows: of its part of the vocabulary, padding included."""
    if name in (WORD_EMBEDDINGS, "head.output.weight"):
        return (rows, shape[-1])
    if name.endswith(ROW_CUT):
        return (*shape[:-1], shape[-1] // tp)
    if name.endswith(COLUMN_CUT):
        return (*shape[:-2], shape[-2] // tp, shape[-1]) if name.endswith("weight") else (*shape[:-1], shape[-1] // tp)
    return shape


def default_bucket_size(config: Config, data_parallel_size: int, *, on_cpu: bool) -> int | None:
    """Elements of a gradient bucket, `--ddp-bucket-size` or the default; None: one bucket."""
    parallel = config.parallel
    if parallel.ddp_bucket_size is not None:
        return parallel.ddp_bucket_size
    if not parallel.overlap_grad_reduce:
        return None
    return 8_000_000 if on_cpu else max(40_000_000, 1_000_000 * data_parallel_size)


def _alike(config: Config, items: range) -> range:
    """The first stage of the same layers: blocks are alike, so what is counted of one holds for the other."""
    return items if 0 in items or config.model.num_layers + 1 in items else range(1, 1 + len(items))


def stage_elements(config: Config, items: range, num_stages: int) -> int:
    """Elements of the parameters of a stage on one tensor-parallel rank."""
    return _stage_elements(config, _alike(config, items), num_stages)


@lru_cache
def _stage_elements(config: Config, items: range, num_stages: int) -> int:
    return sum(parameter.numel for parameter in stage_parameters(config, items, num_stages))


def state_bytes(
    config: Config, world_size: int, items: range, *, num_stages: int, versions: int, num_gradients: int, on_cpu: bool
) -> StateBytes:
    """Bytes of one stage on one rank.

    Args:
        items: what the stage holds, indices into [embedding, block 0, ..., head]. num_stages: of the whole pipeline.
        versions: weight versions alive at once. num_gradients: updates whose gradients are in memory at once.
        on_cpu: whether the ranks are CPU processes (the default bucket is smaller there).
    """
    return _state_bytes(config, world_size, _alike(config, items), num_stages, versions, num_gradients, on_cpu)


@lru_cache
def _state_bytes(
    config: Config, world_size: int, items: range, num_stages: int, versions: int, num_gradients: int, on_cpu: bool
) -> StateBytes:
    size, zero = Precision.of(config), config.parallel.zero_stage
    dp = config.data_parallel_size(world_size)
    shards = max(1, dp // config.parallel.num_distributed_optimizer_instances)
    buckets = _buckets(config, items, num_stages, shards, on_cpu)
    numel = sum(bucket.numel for bucket in buckets)
    owners = shards if zero else 1
    owned = sum(bucket.numel // owners for bucket in buckets)
    streamed = [bucket for bucket in buckets if zero >= 2 and not bucket.tied]
    held = sum(bucket.numel for bucket in buckets if zero < 2 or bucket.tied) * (num_gradients if zero < 2 else 1)
    held += sum(bucket.numel // owners for bucket in streamed)
    come_and_go = zero == 3 and shards > 1
    separate = size.compute != size.wide or versions > 1
    on_host, moments_host, moments = _moments(config, buckets, owners, owned, size)
    largest = sorted((bucket.numel for bucket in buckets), reverse=True)
    return StateBytes(
        weights=versions * (owned if come_and_go else numel) * size.compute,
        gradients=held * size.gradient,
        master=(owned - on_host) * (2 if config.optimizer.store_param_remainders else size.wide) if separate else 0,
        moments=moments,
        scratch=min(2, len(streamed)) * max((bucket.numel for bucket in streamed), default=0) * size.gradient,
        gathered=sum(largest[:2]) * size.compute if come_and_go else 0,
        host=on_host * size.wide + moments_host,
    )


class _Bucket(NamedTuple):
    numel: int
    tied: bool
    whole: bool
    states: int  # elements that carry optimizer state, on the owner with the most of them
    statistics: int  # numbers that every owner keeps, whatever its slice (Adafactor)


def _shapes(model: ModelConfig, items: range) -> dict[str, tuple[int, ...]]:
    """Of the layers `items`, and of both ends, in the order of the model."""
    ends = parameter_shapes(replace(model, num_layers=0))
    shapes = {name: shape for name, shape in ends.items() if name.startswith("embedding")}
    for item in items:
        if 0 < item <= model.num_layers:
            shapes |= layer_shapes(model, item - 1)
    return shapes | {name: shape for name, shape in ends.items() if name.startswith("head")}


def _item_of(name: str, layers: int) -> int:
    first, *rest = name.split(".")
    return int(rest[0]) + 1 if first == "layers" else 0 if first == "embedding" else layers + 1


def _align(count: int, unit: int = ALIGNMENT) -> int:
    return -(-count // unit) * unit


def _buckets(config: Config, items: range, num_stages: int, shards: int, on_cpu: bool) -> list[_Bucket]:
    zero = config.parallel.zero_stage
    by_layer = zero == 3 or (zero == 2 and config.parallel.ddp_bucket_size is None)
    limit = default_bucket_size(config, shards, on_cpu=on_cpu)
    muon = config.optimizer.optimizer == "muon"
    ordered = list(enumerate(stage_parameters(config, items, num_stages)))
    groups: dict[tuple[bool, bool, str], list[list[StageParameter]]] = {}
    order: list[list[StageParameter]] = []
    for _, parameter in sorted(ordered, key=lambda pair: (pair[1].tied, -pair[0])):
        layer = ".".join(parameter.name.split(".")[: 2 if parameter.name.startswith("layers.") else 1])
        key = (parameter.tied, muon and parameter.matrix, layer if by_layer else "")
        stack = groups.setdefault(key, [])
        if not stack or (not by_layer and limit is not None and sum(p.numel for p in stack[-1]) >= limit):
            stack.append([])
            order.append(stack[-1])
        stack[-1].append(parameter)
    return [_bucket(group, shards if zero else 1, muon and group[0].matrix) for group in order]


def _bucket(group: Sequence[StageParameter], shards: int, whole: bool) -> _Bucket:
    statistics = sum(p.statistics for p in group)
    if not whole:
        numel = _align(sum(_align(p.numel) for p in group), shards * ALIGNMENT)
        return _Bucket(numel, group[0].tied, False, numel // shards, statistics)
    loads, states = [0] * shards, [0] * shards
    for parameter in sorted(group, key=lambda p: -p.numel):
        owner = loads.index(min(loads))
        loads[owner] += _align(parameter.numel)
        states[owner] += parameter.numel
    return _Bucket(shards * max(loads), group[0].tied, True, max(states), statistics)


def _moments(
    config: Config, buckets: Sequence[_Bucket], owners: int, owned: int, size: Precision
) -> tuple[int, int, int]:
    """(Elements whose master is on the host, bytes of moments there, bytes of moments on the device)."""
    optimizer = config.optimizer
    fraction = optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0
    first = size.wide if optimizer.exp_avg_dtype == "fp32" else 2
    second = size.wide if optimizer.exp_avg_sq_dtype == "fp32" else 2
    flat = {
        "adam": first + second,
        "sgd": size.wide * (optimizer.sgd_momentum > 0),
        "lion": first,
        "muon": 2 * size.wide,
        "adafactor": 0,
    }[optimizer.optimizer]
    moved = on_host = there = here = 0
    for bucket in buckets:
        share = bucket.numel // owners
        state = bucket.states * (size.wide if bucket.whole else flat)
        if optimizer.optimizer == "adafactor":
            state = bucket.statistics * size.wide
        if not bucket.whole and moved < fraction * owned:
            moved, on_host, there = moved + share, on_host + share, there + state
        else:
            here += state
    return on_host, there, here
