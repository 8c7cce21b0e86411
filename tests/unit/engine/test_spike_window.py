"""What is a spike of the gradient norm: the window against the rule in plain Python, and what the host does."""

from __future__ import annotations

import math
import random
from statistics import fmean, pstdev

import pytest
import torch

from megalite.config import Spikes
from megalite.engine import SpikeGuard
from megalite.errors import RuntimeFailure


def guard(action: str = "skip", sigma: float = 3.0, window: int = 8, most: int = 50) -> SpikeGuard:
    settings = Spikes(on_spike=action, spike_sigma=sigma, spike_window=window)
    return SpikeGuard(settings, torch.device("cpu"), max_skipped=most, speaks=False)


def limit(made: SpikeGuard, norm: float) -> float:
    return float(made.limit(torch.tensor(norm, dtype=torch.float64)))


def rule(entered: list[float], sigma: float, window: int) -> float:
    latest = entered[-window:]
    if 2 * len(latest) < window:
        return math.inf
    mean = fmean(latest)
    return mean + sigma * max(pstdev(latest), 0.25 * mean)


@pytest.mark.parametrize("seed", range(20))
def test_the_limit_is_the_rules(seed: int) -> None:
    draw = random.Random(seed)
    sigma, window = draw.choice([1.0, 3.0, 6.0]), draw.choice([2, 3, 8, 16])
    made, entered, spikes, spread = guard(sigma=sigma, window=window), list[float](), 0, draw.choice([0.3, 1.2])
    for update in range(60):
        odd = 50.0 if update in (30, 45) else draw.choice([draw.gauss(2, 0.3), math.nan, math.inf, 2.0])
        norm = odd if update % 5 == 0 else abs(draw.gauss(2, spread))
        wanted = rule(entered, sigma, window)
        found = limit(made, norm)
        assert found == pytest.approx(wanted, rel=1e-12)
        spike = math.isfinite(norm) and norm > wanted
        assert made.resolve(update, norm, found) == spike
        spikes += spike
        if math.isfinite(norm):
            entered.append(min(norm, found))
    assert spikes >= 2
    assert made.window() == pytest.approx(entered[-window:], rel=1e-12)


@pytest.mark.parametrize("seen", [0, 1, 3, 4, 7, 8, 9, 21])
def test_a_window_goes_on_where_it_was(seen: int) -> None:
    draw = random.Random(seen)
    norms = [abs(draw.gauss(1, 0.2)) for _ in range(seen + 12)]
    whole, first, second = guard(), guard(), guard()
    limits = [limit(whole, norm) for norm in norms]
    for norm in norms[:seen]:
        limit(first, norm)
    second.restore(first.window(), 0)
    assert [limit(second, norm) for norm in norms[seen:]] == pytest.approx(limits[seen:], rel=1e-14)


def test_another_size_of_window_takes_the_newest() -> None:
    small = guard(window=4)
    small.restore([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2)
    assert small.window() == [3.0, 4.0, 5.0, 6.0] and small.in_a_row == 2


def test_a_new_level_becomes_the_usual_one() -> None:
    """Norms that have risen are spikes for some updates, then no longer: what enters the window grows with them."""
    made = guard(sigma=6.0, window=8)
    for update in range(8):
        made.resolve(update, 1.0, limit(made, 1.0))
    skipped = [made.resolve(8 + update, 3.0, limit(made, 3.0)) for update in range(40)]
    assert skipped[0] and not skipped[-1] and sum(skipped) < 20


def test_log_withholds_nothing_and_stop_stops() -> None:
    assert not guard("log").withholds and guard("skip").withholds and guard("stop").withholds
    assert guard("log").resolve(4, 9.0, 2.0) and not guard("log").resolve(4, 2.0, 2.0)
    with pytest.raises(RuntimeFailure, match=r"update 5: the gradient norm of 9 is above 2, .*; stopped before"):
        guard("stop").resolve(4, 9.0, 2.0)


def test_spikes_without_end_are_none() -> None:
    made = guard(most=3)
    assert made.resolve(0, 9.0, 2.0) and made.resolve(1, 9.0, 2.0) and not made.resolve(2, 1.0, 2.0)
    assert made.resolve(3, 9.0, 2.0) and made.resolve(4, 9.0, 2.0)
    with pytest.raises(RuntimeFailure, match=r"the last 3 were skipped \(--max-skipped-updates=3\)"):
        made.resolve(5, 9.0, 2.0)
