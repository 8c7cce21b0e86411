"""The allocator's arithmetic against worked examples, and a composed batch against the same batch rehearsed whole."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from megalite.rehearsal import memory as room
from megalite.rehearsal import rank as ranks
from megalite.rehearsal import rehearse, rehearsed, short
from megalite.rehearsal.allocator import Allocator

MIB = 1 << 20
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --global-batch-size 24 --bf16 --lr 1e-2 "
    "--micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --eval-iters 0 --train-iters 2 "
    "--num-workers 0"
).split()


def test_sizes_and_segments() -> None:
    allocator = Allocator()
    allocator.alloc("a", 1, 0)  # 512 bytes of a small segment
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    allocator.alloc("b", MIB + 1, 0)  # a large one, split
    assert (allocator.allocated, allocator.reserved) == (512 + MIB + 512, 22 * MIB)
    allocator.alloc("c", 19 * MIB, 0)  # of its own size, in steps of 2 MiB
    assert allocator.reserved == 42 * MIB
    allocator.alloc("d", 1, 1)  # another stream has pools of its own
    assert allocator.reserved == 44 * MIB


def test_what_is_freed_is_joined_and_used_again() -> None:
    allocator = Allocator()
    for key in "abcd":
        allocator.alloc(key, 5 * MIB, 0)
    assert allocator.reserved == 20 * MIB
    allocator.free("b")
    allocator.free("c")
    allocator.alloc("e", 9 * MIB, 0)  # the two together; the rest, 1 MiB, stays with it
    assert (allocator.reserved, allocator.allocated) == (20 * MIB, 20 * MIB)


def test_holes_that_are_too_small_cost_a_segment() -> None:
    allocator = Allocator()
    for key in range(8):
        allocator.alloc(key, 5 * MIB, 0)
    for key in range(0, 8, 2):
        allocator.free(key)
    allocator.alloc("large", 8 * MIB, 0)
    assert allocator.reserved == 60 * MIB and allocator.allocated == 28 * MIB


TWO, FOUR = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"


@pytest.mark.parametrize(
    "layout, size",
    [
        (TWO, 2),
        pytest.param(f"{TWO} --num-layers-per-virtual-pipeline-stage 2", 2, marks=pytest.mark.full),
        pytest.param(f"{FOUR} --pipeline-schedule zb-h1", 4, marks=pytest.mark.full),
        pytest.param(f"{TWO} --zero-stage 1 --recompute-granularity full", 4, marks=pytest.mark.full),
    ],
)
def test_a_composed_batch_is_the_whole_one(layout: str, size: int) -> None:
    argv = [*SMALL, *layout.split()]
    composed = rehearse(rehearsed(argv, size))
    whole = 100
    with patch.object(short, "WHOLE", whole), patch.object(ranks, "WHOLE", whole), patch.object(room, "WHOLE", whole):
        executed = rehearse(rehearsed(argv, size))
    assert executed.faults == composed.faults == []
    for one, other in zip(composed.memory, executed.memory, strict=True):
        assert len(executed.records[one.rank].log) > len(composed.records[one.rank].log)
        # The whole batch waits on the device in place of a few micro-batches: five small tensors each, and its loss.
        tokens = 24 * 6 * 512
        assert one.allocated == pytest.approx(other.allocated, abs=tokens), one.rank
        assert one.states == pytest.approx(other.states, rel=1e-4)
