"""What a layer takes at least, by hand and on the page."""

from __future__ import annotations

import pytest

from benchmarks import gpu_page
from benchmarks.layer_cost import LayerCost
from benchmarks.roofline import config_of, rows, seconds_of, table


def test_a_sparse_layer_by_hand() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts of width 768, so 256 rows each of 4,096 tokens; 32 heads of 128, 4 of keys."""
    case = next(row for row in rows() if row.name.endswith("all experts"))
    found = seconds_of(config_of(case), LayerCost(65, 394, 0, 2_800_000_000, 0))
    dense = 2 * 4096 * (2048 * (4096 + 2 * 512) + 4096 * 2048 + 2048 * 128)
    experts = 2 * 8 * 4096 * 3 * 2048 * 768
    core = 4096 * 2 * 4096 * 32 * 128  # two products, half of each seen
    assert found.flops == pytest.approx(3 * (dense + experts + core), rel=1e-12)
    assert found.attention == pytest.approx(3.5 * core / 372e12, rel=1e-12)
    assert found.beside == pytest.approx(1e-3, rel=1e-12)
    # the gradients of the experts' weights: fp32 sums are read and written, and nothing else waits for memory that long
    fc1, fc2 = ((2 * 32768 * (n + k) + 8 * 128 * n * k) / 2.8e12 for n, k in ((1536, 2048), (2048, 768)))
    slow = fc1 + fc2 - experts / 680e12
    assert found.waiting == pytest.approx(slow, rel=0.35) and found.waiting > slow
    assert found.products == pytest.approx(3 * (dense + experts) / 680e12 + found.waiting, rel=1e-12)


@pytest.mark.landing
def test_the_page_shows_what_is_counted() -> None:
    assert gpu_page.written("roofline") == table()
