"""Owners of whole matrices: nothing is padded, and every owner has nearly as much as every other."""

from __future__ import annotations

import itertools
import math

import pytest

from megalite.config import OPTIMIZER_SPECS, ModelConfig
from megalite.inventory import BucketPlan, BufferParameter, parameter_shapes, plan_buckets
from megalite.inventory.parameter_placement import ParameterPlacement

LLAMA_7B = ModelConfig(
    model_type="llama", num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32,
    seq_length=4096, vocab_size=32000,
)  # fmt: skip
MOST = max(4096 * 12288, 4096 * 22016)
"""Elements of the largest matrix: query, key and value, or gate and up, are one."""


def matrices() -> list[BufferParameter]:
    rule = OPTIMIZER_SPECS["muon"].whole
    assert rule is not None
    named = [(name, shape) for name, shape in parameter_shapes(LLAMA_7B).items() if rule(name, len(shape))]
    places = [ParameterPlacement(shape, (0,) * len(shape)) for _, shape in named]
    return [
        BufferParameter(i, name, shape, place, whole=True)
        for i, ((name, shape), place) in enumerate(zip(named, places, strict=True))
    ]


def planned(shards: int, bucket_size: int | None, stage: int) -> list[BucketPlan]:
    return plan_buckets(
        matrices(), zero_stage=stage, shards=shards, bucket_size=bucket_size, overlap=True, on_cpu=False
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("bucket_size", [1_000_000, None, 500_000_000])
@pytest.mark.parametrize("shards", [2, 7, 8, 32, 256])
def test_owners_of_whole_matrices_pad_nothing(shards: int, bucket_size: int | None, stage: int) -> None:
    plans = planned(shards, bucket_size, stage)
    elements = sum(math.prod(entry.shape) for entry in matrices())
    assert elements == sum(plan.stop - plan.start for plan in plans)  # every one is a multiple of the alignment
    owned = [0] * shards
    for plan in plans:
        assert len(plan.bounds) == shards + 1 and (plan.bounds[0], plan.bounds[-1]) == (plan.start, plan.stop)
        for owner, (start, stop) in enumerate(itertools.pairwise(plan.bounds)):
            own = [s for s in plan.segments if start <= s.start and s.stop <= stop]
            assert own == plan.segments_of(owner)  # none is cut
            assert sum(s.stop - s.start for s in own) == plan.sizes[owner] == stop - start
            owned[owner] += stop - start
    assert max(owned) - min(owned) <= MOST  # of the one that took the last of them, less than that more
    assert [range_.start for plan in plans for range_ in plan.ranges] == sorted(
        range_.start for plan in plans for range_ in plan.ranges
    )
