"""Tensor parallelism over grids: losses, gradient norms, weights and moments are those of one process."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from equivalence.layouts import (
    TINY,
    Layout,
    assert_close,
    assert_same_tensors,
    compare,
    draw,
    saved_tensors,
    train,
    train_body,
)
from megalite.testing import run_ranks

GPT = ("--num-layers", "2", "--ffn-hidden-size", "48")
LLAMA = (*GPT, *"--model-type llama --num-query-groups 4 --fp32-residual-connection --vocab-size 59".split())
OTHER = (
    *GPT,
    *"--normalization RMSNorm --apply-layernorm-1p --activation geglu --hidden-dropout 0.2 --attention-dropout 0.1 "
    "--untie-embeddings-and-output-weights --z-loss-coeff 1e-3".split(),
)
CASES = {
    "2d": (GPT, "--tensor-parallel-mode 2d --micro-batch-size 2", 4),
    "3d": (LLAMA, "--tensor-parallel-mode 3d --micro-batch-size 2", 8),
    "2.5d": (OTHER, "--tensor-parallel-mode 2.5d --micro-batch-size 4", 8),
    "4d": (OTHER, "--tensor-parallel-mode 4d --tensor-parallel-grid 2 2 1 --micro-batch-size 2", 4),
    "4d-inner": (LLAMA, "--tensor-parallel-mode 4d --tensor-parallel-grid 4 1 2 --micro-batch-size 2", 8),
    "4d-sharded": (
        GPT,
        "--tensor-parallel-mode 4d --tensor-parallel-grid 1 2 2 --micro-batch-size 2 --zero-stage 3 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        8,
    ),
    "pipeline": (
        GPT,
        "--tensor-parallel-mode 2d --micro-batch-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 "
        "--zero-stage 1",
        8,
    ),
}


def ranks_of(case: str) -> str:
    """`--tensor-model-parallel-size`."""
    return {"4d": "4", "4d-sharded": "4", "2d": "4", "pipeline": "4"}.get(case, "8")


@pytest.mark.parametrize(
    "case", [name if name in ("2d", "3d") else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_a_grid_trains_like_one_process(case: str) -> None:
    model, layout, world = CASES[case]
    argv = [*TINY, *model, *layout.split(), "--tensor-model-parallel-size", ranks_of(case)]
    expected = Layout(model, (), world).expected(3)
    found = train(argv, world, 3)
    assert_close(found.losses, expected.losses, 1e-12, "loss")
    assert_close(found.norms, expected.norms, 1e-12, "gradient norm")
    assert_same_tensors(found.tensors, expected, 1e-11 * expected.magnified)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "lion", "adam in 16 bits"])
def test_random_layouts_with_grids(optimizer: str, fresh: int) -> None:
    rng = random.Random(f"grids {optimizer} {fresh}")
    compare(draw(rng, optimizer, lambda case: "--tensor-parallel-mode" in case.layout))


def test_a_checkpoint_moves_between_modes(tmp_path: Path) -> None:
    """Two steps as a grid, two along one side, two as another grid: those of six in one process."""
    argv = [
        *TINY,
        *GPT,
        "--micro-batch-size",
        "2",
        "--save",
        str(tmp_path),
        "--data-cache-path",
        str(tmp_path / "cache"),
    ]
    expected = Layout(GPT, (), 4).expected(6)
    layouts = ("2d", "", "4d --tensor-parallel-grid 2 1 2")
    losses = []
    for number, mode in enumerate(layouts):
        grid = f"--tensor-parallel-mode {mode}".split() if mode else []
        loaded = ["--load", str(tmp_path)] if number else []
        results = run_ranks(train_body, 4, [*argv, *loaded, "--tensor-model-parallel-size", "4", *grid], 2)
        losses += results[0][0]
    assert_close(losses, expected.losses, 1e-12, "loss")
    assert_same_tensors(saved_tensors(tmp_path), expected, 1e-11 * expected.magnified)
