"""`benchmarks/steps.py` measures what it says: every variant of a table trains, by turns."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from benchmarks import steps

TINY = "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1"


@pytest.mark.parametrize("table", steps.TABLES)
def test_all_variants_of_a_table_take_turns(table: str) -> None:
    flags, variants = steps.TABLES[table]
    few = dict([*variants.items()][-2:])
    with patch.object(steps, "STEPS", 1):
        times = steps.measure(f"{flags} {TINY}", few, 2)
    assert list(times) == list(few) and all(len(found) == 2 and min(found) > 0 for found in times.values())
