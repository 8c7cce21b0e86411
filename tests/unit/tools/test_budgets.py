"""No block costs more launches, waits, bytes or memory on a GPU than docs/gpus.md says: counted again, without one."""

from __future__ import annotations

import pytest

from benchmarks import gpu_page
from benchmarks.budgets import CASES, Case, count, held, table


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_block_costs_no_more_than_its_budget(case: Case) -> None:
    found, most = count(case), held()[case.name]
    over = [f"{name} {a}, at most {b}" for name, a, b in zip(found._fields, found, most, strict=True) if a > b]
    assert not over, f"{'; '.join(over)}: mend it, or say why in python benchmarks/budgets.py --write"


GRAPHED = {0: (5, 20), 1: (5, 10)}
"""Case -> launches forward and backward by CUDA graphs. Of these 4 and 2 are a stage's, not a block's: copies of its
input and positions, of its result, and of that one's gradient. Of the backward's others one is the graph."""
HELD = 4 * 2 * 2**25
"""Bytes of a stage's graphs beside those of its blocks: copies of its input and of its result, and of their gradients,
each of 2^25 elements in bf16."""


@pytest.mark.parametrize("index", GRAPHED)
def test_graphs_leave_the_gradients_of_weights_to_launch(index: int) -> None:
    case = CASES[index]
    found = count(case._replace(flags=f"{case.flags} --cuda-graph-impl local"))
    assert (found.forward, found.backward, found.waits) == (*GRAPHED[index], 0)
    assert 0 <= found.peak - held()[case.name].peak - HELD < 1 << 20


def test_the_page_shows_the_budgets_that_are_held() -> None:
    assert gpu_page.written("budgets") == table(held())
