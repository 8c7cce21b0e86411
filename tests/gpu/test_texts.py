"""Texts and scores of a model on a device are those of one process of a CPU, in fp64: alone, and over several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.test_generation_layouts import (
    DRAWN,
    FILTERED,
    GREEDY,
    MODELS,
    Layout,
    checkpoint,
    continued,
    parallel_of,
    scored,
)
from gpu.devices import DEVICES, HAS_CUDA

from megalite.comm import World
from megalite.inference import load_for_inference, score_text
from megalite.testing import run_ranks, run_single
from tests.unit.inference.tiny_checkpoint import TEXT

CASES: dict[str, tuple[str, Layout, int]] = {
    "one rank": ("llama", {}, 1),
    "windows": ("windows", {}, 1),
    "sinks and caps": ("sinks", {}, 1),
    "latent attention": ("latent", {}, 1),
    "tensor parallel": ("gpt", {"tp": 2}, 2),
    "a pipeline": ("llama", {"pp": 2}, 2),
    "experts dealt out": ("sparse", {"ep": 2}, 2),
    "a shared sequence": ("windows", {"cp": 2}, 2),
}
"""Model, layout, ranks: over NCCL where there is a GPU for each, else over gloo on one GPU."""
ANYWHERE = [pytest.param("cpu", marks=pytest.mark.full), *DEVICES[1:]]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ANYWHERE)
def test_texts_and_scores_are_those_of_a_cpu(name: str, device: str, tmp_path: Path) -> None:
    model, layout, ranks = CASES[name]
    checkpoint(tmp_path, MODELS[model])
    given: tuple[Any, ...] = (str(tmp_path), layout, [GREEDY, DRAWN, FILTERED])
    options = {"micro_batch_size": 1} if "ep" in layout else {}
    expected = run_single(continued, given[0], {}, given[2], **options)
    sums, scores = run_single(scored, given[0], {})
    assert run_ranks(continued, ranks, *given, device=device, timeout=300.0, **options) == [expected] * ranks
    for found, others in run_ranks(scored, ranks, given[0], layout, device=device, timeout=300.0):
        assert found == pytest.approx(sums, rel=1e-10)
        assert others == [(pytest.approx(score, rel=1e-10), greedy) for score, greedy in scores]


def half(world: World, directory: str, layout: Layout) -> float:
    """The loss of a text, of a model in bf16 with a cache."""
    where = {"device": world.device.type, "world": world, "parallel": parallel_of(layout)}
    loaded = load_for_inference(directory, dtype=torch.bfloat16, **where)  # type: ignore[arg-type]  # of three kinds
    whole = score_text(loaded, TEXT, overlap=3, micro_batch_size=2)
    return whole.loss_sum / whole.num_tokens


@pytest.mark.parametrize("name", ["one rank", "windows", "sinks and caps", "tensor parallel"])
@pytest.mark.parametrize("device", ANYWHERE)
def test_bf16_stays_near(name: str, device: str, tmp_path: Path) -> None:
    """There attention is another kernel."""
    model, layout, ranks = CASES[name]
    checkpoint(tmp_path, MODELS[model])
    sums, _ = run_single(scored, str(tmp_path), {})
    found = run_ranks(half, ranks, str(tmp_path), layout, device=device, timeout=300.0)
    assert found == pytest.approx([sums[0] / sums[1]] * ranks, rel=2e-2)
    assert len(set(found)) == 1 and found[0] != sums[0] / sums[1], "it was not in bf16"


def where_weights_are(world: World, directory: str) -> str:
    loaded = load_for_inference(directory, device="auto", world=world)
    return next(loaded.parts.stages[0].parameters()).device.type


def test_a_gpu_is_taken_by_itself(tmp_path: Path) -> None:
    checkpoint(tmp_path, MODELS["gpt"])
    device = "cuda" if HAS_CUDA else "cpu"
    assert run_single(where_weights_are, str(tmp_path), device=device) == device
