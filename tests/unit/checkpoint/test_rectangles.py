"""The geometry of resharding against brute force on masks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megalite.checkpoint.format import StoredTensor
from megalite.checkpoint.reshard import HeldRectangle, share_out
from megalite.inventory.boxes import Box, cover, find_overlap


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    offset = tuple(rng.randrange(extent) for extent in shape)
    return Box(offset, tuple(rng.randint(1, extent - start) for extent, start in zip(shape, offset, strict=True)))


def mask(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    result = np.zeros(shape, dtype=int)
    result[box.slices_in(Box((0,) * len(shape), shape))] = 1
    return result


@pytest.mark.parametrize("seed", range(20))
def test_intersection_overlap_and_cover_agree_with_masks(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3)))
    for _ in range(50):
        boxes = [random_box(rng, shape) for _ in range(rng.randint(1, 4))]
        masks = [mask(box, shape) for box in boxes]
        common = boxes[0].intersect(boxes[-1])
        assert (common.numel if common else 0) == (masks[0] * masks[-1]).sum()
        assert (find_overlap(boxes) is not None) == bool((sum(masks) > 1).any())
        wanted = random_box(rng, shape)
        exact = bool((sum(masks)[mask(wanted, shape) == 1] == 1).all())
        if exact:
            pieces = cover(wanted, boxes)
            assert (sum(mask(piece, shape) for _, piece in pieces) == mask(wanted, shape)).all()
        else:
            with pytest.raises(ValueError, match="elements"):
                cover(wanted, boxes)


def test_two_scalars_overlap() -> None:
    assert find_overlap([Box((), ()), Box((), ())]) is not None
    assert find_overlap([Box((), ())]) is None
    assert cover(Box((), ()), [Box((), ())]) == [(0, Box((), ()))]


def test_work_is_spread_over_copies_and_every_box_is_written_once() -> None:
    big, small = Box((0, 0), (1001, 1024)), Box((0,), (64,))
    names = [f"bias{i}" for i in range(9)]
    holdings = [
        [HeldRectangle("w", big, rank), *(HeldRectangle(name, small, rank) for name in names)] for rank in range(4)
    ]
    tensors = {"w": StoredTensor("F32", big.shape)} | dict.fromkeys(names, StoredTensor("F32", small.shape))
    shared = share_out(tensors, holdings, range(len(holdings)))
    duties = [shared.of(rank) for rank in range(len(holdings))]
    rows = sorted((mine[0].offset[0], mine[0].end[0]) for mine in duties)
    assert rows[0][0] == 0 and rows[-1][1] == 1001
    assert all(a[1] == b[0] for a, b in zip(rows, rows[1:], strict=False))
    assert sorted(index for mine in duties for index in mine if index) == list(range(1, 10))
    numels = [sum(box.numel for box in mine.values()) for mine in duties]
    assert max(numels) - min(numels) <= 1024 + 64


def test_a_box_without_replica_zero_is_not_written() -> None:
    whole, half = Box((0,), (8,)), Box((0,), (4,))
    holdings = [[HeldRectangle("w", whole, 0)], [HeldRectangle("w", half, 1)]]
    duties = share_out({"w": StoredTensor("F32", whole.shape)}, holdings, range(2))
    assert [len(duties.of(rank)) for rank in (0, 1)] == [1, 0]


@pytest.mark.parametrize("rows", [3, 2**18])  # written by one rank; dealt out by rows
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_holds_a_box_twice_writes_it_once(rows: int, ranks: int) -> None:
    """Tied weights, where the first and the last stage are on one rank."""
    box = Box((0, 0), (rows, 2))
    duties = share_out({"w": StoredTensor("F64", box.shape)}, [[HeldRectangle("w", box)] * 2] * ranks, range(ranks))
    boxes = [part for rank in range(ranks) for part in duties.of(rank).values()]
    assert find_overlap(boxes) is None and sum(b.numel for b in boxes) == box.numel
