"""Loss scaling: growth, tolerance of overflows, resume; clipping by norm."""

from __future__ import annotations

from megalite.config import LossScaling
from megalite.optim import DynamicLossScaler, LossScaler


def run(scaler: DynamicLossScaler, overflows: str) -> list[float]:
    """Scale after each step; `x` is an overflow, `.` a good step."""
    scales = []
    for step in overflows:
        scaler.update(found_non_finite=step == "x")
        scales.append(scaler.scale)
    return scales


def small(hysteresis: int = 2) -> DynamicLossScaler:
    settings = LossScaling(initial_loss_scale=16, min_loss_scale=2, loss_scale_window=3, hysteresis=hysteresis)
    return DynamicLossScaler(settings)


def test_scale_doubles_after_a_window_of_good_steps() -> None:
    assert run(small(), "......") == [16, 16, 32, 32, 32, 64]


def test_an_overflow_restarts_the_window() -> None:
    assert run(small(), "..x...") == [16, 16, 16, 16, 16, 32]


def test_hysteresis_tolerates_overflows_until_the_scale_grows() -> None:
    assert run(small(), "xx") == [16, 8]
    assert run(small(), "x..x") == [16, 16, 16, 8], "tolerance comes back with a growth, not with good steps"
    assert run(small(), "x...x") == [16, 16, 16, 32, 32]
    assert run(small(hysteresis=1), "x") == [8]


def test_scale_stops_at_its_minimum() -> None:
    assert run(small(), "xxxxxx") == [16, 8, 4, 2, 2, 2]


def test_resume_continues_where_it_was() -> None:
    whole, first = small(), small()
    want = run(whole, "..x..x.x....")
    run(first, "..x..x")
    second = small()
    second.load_state_dict(first.state_dict())
    assert run(second, ".x....") == want[6:]


def test_constant_scale_never_moves() -> None:
    scaler = LossScaler(128.0, skips_non_finite=True)
    scaler.update(found_non_finite=True)
    assert scaler.scale == 128.0 and scaler.skips_non_finite
    assert not LossScaler().skips_non_finite
