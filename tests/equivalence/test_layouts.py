"""Any layout equals one process: named corners, then random configurations. A failure prints the command to replay."""

from __future__ import annotations

import random
import time

import pytest

from equivalence.layouts import Layout, compare, draw

CORNERS = {
    "one process": ((), 1),
    "dp2": ((), 2),
    "tp2": (("--tensor-model-parallel-size", "2"), 2),
    "tp2 sequence parallel": (("--tensor-model-parallel-size", "2", "--sequence-parallel"), 2),
    "pp2": (("--pipeline-model-parallel-size", "2"), 2),
    "tp2 dp2 zero1": (("--tensor-model-parallel-size", "2", "--zero-stage", "1"), 4),
    "pp2 dp2 zero3": (("--pipeline-model-parallel-size", "2", "--zero-stage", "3"), 4),
}


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("name", CORNERS)
def test_corner(name: str, family: str) -> None:
    flags, world_size = CORNERS[name]
    compare(Layout(("--num-layers", "4", "--model-type", family), ("--micro-batch-size", "1", *flags), world_size))


def test_dropout_is_the_same_at_every_layout() -> None:
    model = ("--num-layers", "4", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    for flags, world_size in [CORNERS["tp2 sequence parallel"], CORNERS["pp2"], CORNERS["dp2"]]:
        compare(Layout(model, ("--micro-batch-size", "1", *flags), world_size))


def test_random_layouts(full: bool) -> None:
    """A fixed seed and a fresh one, so that every run of the suite also tries something new."""
    fresh = int(time.time()) % 1_000_000
    for seed, count in ((1, 60 if full else 8), (fresh, 60 if full else 4)):
        rng = random.Random(seed)
        for number in range(count):
            try:
                compare(draw(rng))
            except BaseException:
                print(f"seed {seed}, configuration {number}")
                raise
