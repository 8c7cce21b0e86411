"""Learning-rate and weight-decay schedules against values worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from megalite.optim import LearningRateSchedule, WeightDecaySchedule


def schedule(**fields: Any) -> LearningRateSchedule:
    return LearningRateSchedule(**{"lr": 1.0, "min_lr": 0.1, "decay_samples": 1100, "warmup_samples": 100, **fields})


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_first_step_is_made_at_warmup_init(style: Any) -> None:
    rule = schedule(style=style, warmup_init=0.02)
    assert rule(0) == 0.02
    assert rule(50) == pytest.approx(0.51)
    assert rule(100) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("style", "samples", "value"),
    [
        ("constant", 5000, 1.0),
        ("linear", 350, 0.1 + 0.75 * 0.9),
        ("linear", 1100, 0.1),
        ("linear", 5000, 0.1),
        ("cosine", 600, 0.55),
        ("cosine", 350, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 1101, 0.1),
        ("inverse-square-root", 400, 0.5),
        ("inverse-square-root", 1100, math.sqrt(100 / 1100)),
    ],
)
def test_decay(style: Any, samples: int, value: float) -> None:
    assert schedule(style=style)(samples) == pytest.approx(value)


@pytest.mark.parametrize(
    ("style", "middle"),
    [
        ("linear", 0.55),
        ("cosine", 0.55),
        ("exponential", 0.1 + 0.9 * (math.sqrt(2) - 1)),
        ("minus_sqrt", 0.1 + 0.9 * (1 - math.sqrt(0.5))),
    ],
)
def test_wsd_is_flat_then_falls(style: Any, middle: float) -> None:
    rule = schedule(style="WSD", wsd_style=style, wsd_decay_samples=200)
    assert rule(500) == rule(900) == 1.0
    assert rule(1000) == pytest.approx(middle)
    assert rule(1100) == pytest.approx(0.1)
    assert rule(2000) == 0.1


def test_without_warmup_the_first_step_has_the_full_rate() -> None:
    assert schedule(warmup_samples=0)(0) == 1.0
    assert schedule(warmup_samples=0, style="inverse-square-root")(4) == pytest.approx(0.5)


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root"])
def test_decay_never_rises_and_stays_above_the_minimum(style: Any) -> None:
    values = [schedule(style=style)(samples) for samples in range(100, 3000, 7)]
    assert all(b <= a for a, b in pairwise(values))
    assert min(values) >= 0.1


def test_weight_decay_ramp() -> None:
    assert WeightDecaySchedule(0.3, 0.3)(0) == 0.3
    linear = WeightDecaySchedule(0.0, 1.0, "linear", 200)
    assert [linear(s) for s in (0, 50, 200, 300)] == pytest.approx([0.0, 0.25, 1.0, 1.0])
    cosine = WeightDecaySchedule(0.0, 1.0, "cosine", 200)
    assert [cosine(s) for s in (0, 100, 200, 300)] == pytest.approx([0.0, 0.5, 1.0, 1.0])
    assert cosine(50) == pytest.approx(0.5 * (1 - math.cos(math.pi / 4)))
