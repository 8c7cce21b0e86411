"""Nothing is reported of random sound layouts, rehearsed whole."""

from __future__ import annotations

import random

import pytest

from equivalence.layouts import TINY, Layout, draw
from megalite.rehearsal import rehearse_run, rehearsed

COUNT, LANDING = 40, (0, 1, 16, 30)


def fit(case: Layout) -> bool:
    """Float8 has widths of its own on a GPU; NCCL does not say what has arrived."""
    return "--fp8-format" not in case.model and case.world_size <= 4 and case.schedule != "message-driven"


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.landing if n in LANDING else pytest.mark.full) for n in range(COUNT)]
)
def test_a_random_layout_has_no_fault(number: int) -> None:
    case = draw(random.Random(f"rehearsal {number}"), want=fit)
    argv = [*TINY, *case.model, *case.layout]
    if number % 2:
        argv = ["--bf16" if word == "--fp64" else word for word in argv]
    print(case.world_size, " ".join(argv))
    assert rehearse_run(rehearsed(argv, case.world_size)).faults == []
