"""Blends and splits: shares, order, and the words that name them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from megalite.data import blend
from megalite.data.blend import blend_order, normalise, parse_blend, samples_per_part
from megalite.data.splits import bounds_of, parse_split
from megalite.errors import DataError


def greedy(weights: list[int], size: int) -> list[int]:
    """The rule in exact arithmetic: the part furthest behind its share goes next, the first of equals."""
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    taken = [0] * len(weights)
    order = []
    for step in range(size):
        behind = [share * max(step, 1) - count for share, count in zip(shares, taken, strict=True)]
        order.append(behind.index(max(behind)))
        taken[order[-1]] += 1
    return order


@pytest.mark.parametrize("weights", [[1], [1, 1], [3, 1], [1, 2, 4, 8], [5, 0, 2]])
def test_blend_follows_the_greedy_rule(weights: list[int]) -> None:
    # Shares that are exact in binary leave no room for rounding, so that ties are ties.
    total = sum(weights)
    scaled = weights if total & (total - 1) == 0 else [*weights, 2 ** total.bit_length() - total]
    parts, samples = blend_order(scaled, 300)
    assert parts.tolist() == greedy(scaled, 300)
    for part in range(len(scaled)):
        assert samples[parts == part].tolist() == list(range(int((parts == part).sum())))
    assert parts.dtype == np.int16 and samples.dtype == np.int64


def test_blend_equals_numbers_recorded_from_megatron() -> None:
    parts, samples = blend_order([0.7, 0.2, 0.1], 12)
    assert parts.tolist() == [0, 1, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1]
    assert samples.tolist() == [0, 0, 1, 0, 2, 3, 4, 1, 5, 6, 7, 2]


def one_after_the_other(weights: list[float], size: int) -> tuple[list[int], list[int]]:
    """Megatron-LM's loop: one step after the other, in float64."""
    shares, taken = normalise(weights), [0] * len(weights)
    parts, samples = [], []
    for step in range(size):
        behind = [share * (float(step) if step else 1.0) - count for share, count in zip(shares, taken, strict=True)]
        best = behind.index(max(behind))
        parts.append(best)
        samples.append(taken[best])
        taken[best] += 1
    return parts, samples


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        (lambda draw: draw.random(5) + 1e-3, 20_000),
        (lambda draw: draw.random(40) ** 6 + 1e-7, 20_000),  # parts that remember for longer than a stretch
        (lambda draw: draw.random(40) ** 2 + 1e-3, 5),
        (lambda draw: draw.random(300) ** 3 + 1e-5, 6_000),  # more parts than stretches
        (lambda draw: np.ones(300), 5_000),  # ties everywhere
        (lambda draw: np.array([0, 0.5, 0.5]), 9_000),  # nobody is behind: the first part, which has no weight
        (lambda draw: np.array([1e-6, 1, 1e-3, 3]), 20_000),
    ],
)
def test_stretches_side_by_side_are_the_loop_bit_for_bit(weights: Any, size: int, monkeypatch: Any) -> None:
    for name, value in {"SHORTEST": 64, "WARM": 16}.items():
        monkeypatch.setattr(blend, name, value)
    drawn = weights(np.random.default_rng(7)).tolist()
    parts, samples = blend_order(drawn, size)
    assert (parts.tolist(), samples.tolist()) == one_after_the_other(drawn, size)


def test_a_longer_blend_begins_with_the_shorter_one() -> None:
    short, long = blend_order([0.3, 0.7], 50), blend_order([0.3, 0.7], 80)
    assert short[0].tolist() == long[0][:50].tolist() and short[1].tolist() == long[1][:50].tolist()


def test_parts_are_asked_for_their_share_and_a_little_more() -> None:
    assert samples_per_part(normalise([30, 70]), 1000) == [302, 704]
    assert samples_per_part(normalise([30, 70]), 1000, 0.0) == [300, 700]


def test_words_of_a_blend() -> None:
    assert parse_blend(["a"]) == (["a"], None)
    assert parse_blend(["a", "b"]) == (["a", "b"], None)
    assert parse_blend(["0.3", "a", "0.7", "b"]) == (["a", "b"], [0.3, 0.7])
    assert parse_blend(["1", "a", "2"]) == (["1", "a", "2"], None)
    with pytest.raises(DataError, match="--data-path=0.3 a b c: weights and paths are mixed"):
        parse_blend(["0.3", "a", "b", "c"])
    with pytest.raises(DataError, match="weights must be 0 or more"):
        parse_blend(["-1", "a", "2", "b"])


def test_splits_are_normalised_and_contiguous() -> None:
    parts = parse_split("969,30,1")
    assert [bounds_of(part, 1000) for part in parts] == [(0, 969), (969, 999), (999, 1000)]
    assert [bounds_of(part, 7) for part in parse_split("1, 1")] == [(0, 4), (4, 7), (0, 0)]
    assert parse_split("90,10") == parse_split("0.9,0.1,0")
    for text in ("a,b", "1,2,3,4", "", "-1,2", "0,0", "nan,1", "inf"):
        with pytest.raises(DataError, match=f"^--split={text}: "):
            parse_split(text)
