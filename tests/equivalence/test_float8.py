"""Products in float8: any layout equals one process with micro-batches of the same size, and the definition."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from equivalence.layouts import TINY, Layout, compare, draw, drawn, saved_tensors, train_body
from megalite.comm.world import World
from megalite.parallel.tensor import float8
from megalite.testing import run_ranks

HALVES = "--micro-batch-size", "2", "--tp-comm-overlap"  # each half has scales of its own, as a micro-batch of 1
LAYOUTS = {
    "one process": ((), 1),
    "tp2 sequence parallel": (("--tensor-model-parallel-size", "2", "--sequence-parallel"), 2),
    "pp2": (("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zb-h1"), 2),
    "2bw": (("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "2bw"), 2),
    "cp2": (("--context-parallel-size", "2"), 2),
    "tp2 halves": (("--tensor-model-parallel-size", "2", *HALVES), 2),
    "tp2 halves sequence parallel": (("--tensor-model-parallel-size", "2", *HALVES, "--sequence-parallel"), 2),
    "tp2 pp2 dp2": (
        ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--zero-stage", "1"),
        8,
    ),
}


def case(name: str, *model: str) -> Layout:
    flags, world_size = LAYOUTS[name]
    return Layout(
        ("--num-layers", "2", *model), ("--micro-batch-size", "1", *flags), world_size, delay=int(name == "2bw")
    )


@pytest.mark.parametrize(
    "name", [name if name in ("2bw", "tp2 halves") else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
)
def test_a_layout_equals_one_process(name: str) -> None:
    compare(case(name, "--fp8", "format=hybrid"))


@pytest.mark.parametrize(
    "name",
    [
        name if name == "2bw" else pytest.param(name, marks=pytest.mark.full)
        for name in LAYOUTS
        if "halves" not in name  # refused
    ],
)
def test_delayed_scales(name: str) -> None:
    compare(case(name, "--fp8", "format=hybrid", "recipe=delayed", "amax_history_len=2"), steps=4)


@pytest.mark.parametrize("name", ["tp2 sequence parallel", pytest.param("cp2", marks=pytest.mark.full)])
def test_rows(name: str) -> None:
    compare(case(name, "--fp8", "format=e4m3", "recipe=rowwise", "--swiglu"))


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_blocks_end_where_ranks_do(recipe: str) -> None:
    width = "256" if recipe == "blockwise" else "64"
    model = ("--hidden-size", width, "--fp8", "format=e4m3", f"recipe={recipe}", "--seq-length", "48")
    compare(case("tp2 sequence parallel", *model), steps=2)


def small(case: Layout) -> bool:
    sample = "--micro-batch-size 1" in " ".join(case.layout) or "--tp-comm-overlap" in case.layout
    return sample and case.world_size <= 4


def test_halves_with_float8_are_drawn() -> None:
    rng, seen = random.Random(3), set()
    for _ in range(4000):
        case = drawn(rng, "adam")
        if "--fp8-format" in case.model and "--tp-comm-overlap" in case.layout and "delayed" not in case.model:
            seen.add("--sequence-parallel" in case.layout)
    assert seen == {True, False}


@pytest.mark.landing
def test_random_layouts(full: bool, fresh: int) -> None:
    rng = random.Random(f"fp8 {fresh}")
    for _ in range(20 if full else 1):
        kind = ["--fp8-format", rng.choice(["e4m3", "hybrid"])]
        kind += ["--fp8-recipe", rng.choice(["tensorwise", "rowwise", "delayed"])]
        compare(draw(rng, "adam", small, more=kind))


def own_scales_body(world: World, argv: list[str], steps: int) -> Any:
    with patch.object(float8, "all_reduce_", lambda x, axis, op: None):
        return train_body(world, argv, steps)


def test_a_scale_of_its_own_on_each_rank_is_seen() -> None:
    with pytest.raises(AssertionError, match="replay|disagree"):
        compare(case("tp2 sequence parallel", "--fp8", "format=e4m3"), body=own_scales_body)


@pytest.mark.landing
def test_delayed_scales_resume_bitwise(tmp_path: Path) -> None:
    """2BW's older weights have scales of their own; the first of all has none yet."""
    model = ("--num-layers", "2", "--fp8", "format=e4m3", "recipe=delayed", "--micro-batch-size", "1")
    layout = ["--pipeline-schedule", "2bw", "--pipeline-model-parallel-size", "2"]
    argv = [*TINY, *model, *layout, "--data-cache-path", str(tmp_path / "cache")]
    run_ranks(train_body, 2, [*argv, "--save", str(tmp_path / "whole")], 4)
    argv += ["--save", str(tmp_path / "parts")]
    run_ranks(train_body, 2, argv, 1)
    for steps in (1, 2):
        run_ranks(train_body, 2, [*argv, "--load", str(tmp_path / "parts")], steps)
    whole, parts = saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "parts")
    assert any(name.startswith("optimizer/fp8/") for name in whole)
    assert [name for name, value in whole.items() if not torch.equal(value, parts[name])] == []
