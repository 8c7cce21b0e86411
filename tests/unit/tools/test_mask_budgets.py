"""No kind of mask costs more launches on a GPU than docs/gpus.md says: counted again, without one."""

from __future__ import annotations

import pytest

from benchmarks import gpu_page
from benchmarks.masks import KINDS, PLACES, count, held, table

MOST = 12
"""Launches of any kind on one rank, in the first layer of a micro-batch, too."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[] if place == "alone" else pytest.mark.landing) for place in PLACES]
)
def test_a_mask_costs_no_more_than_its_budget(kind: str, place: str) -> None:
    found, most = count(kind, place), held()[kind][place]
    assert all(a <= b for a, b in zip(found, most, strict=True)), f"{found}, at most {most}"
    assert found.waits == 0 and (place != "alone" or found.forward + found.once <= MOST), found


def test_the_page_shows_the_budgets_that_are_held() -> None:
    assert gpu_page.written("masks") == table(held())
