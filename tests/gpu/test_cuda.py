"""The equality tests on a GPU: the same product, the same oracle (which stays on the CPU)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from equivalence.layouts import TINY, assert_close, saved_tensors

from megalite.observe.observers import read_metrics
from megalite.testing.oracle import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ROOT = Path(__file__).parents[2]
STEPS = 5
MODELS = {
    "gpt": ("--num-layers", "4"),
    "llama": ("--num-layers", "4", "--model-type", "llama", "--num-query-groups", "2", "--qk-layernorm"),
    "recompute": ("--num-layers", "4", "--recompute-granularity", "full", "--recompute-method", "uniform"),
    "2bw": ("--num-layers", "4", "--pipeline-schedule", "2bw"),
    "documents": ("--num-layers", "4", "--reset-position-ids", "--reset-attention-mask"),
    "window": ("--num-layers", "4", "--window-size", "5"),
    "rows on the host": (
        *("--num-layers", "4", "--untie-embeddings-and-output-weights"),
        *("--offload", "embedding", "cache_rows=16"),
    ),
}


def run(folder: Path, *flags: str) -> list[dict]:
    argv = [*TINY, *flags, "--save", str(folder), "--data-cache-path", str(folder.parent / "cache")]
    argv += ["--micro-batch-size", "1", "--log-interval", "1", "--device", "cuda"]
    argv[argv.index("--train-iters") + 1] = str(STEPS)
    subprocess.run([sys.executable, "pretrain_gpt.py", *argv], cwd=ROOT, check=True, timeout=300)
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.parametrize("name", MODELS)
def test_fp64_on_the_gpu_is_the_oracle(name: str, tmp_path: Path) -> None:
    records = run(tmp_path / "run", *MODELS[name])
    model = tuple(flag for flag in MODELS[name] if flag not in ("--pipeline-schedule", "2bw"))
    expected = reference((*TINY, "--micro-batch-size", "1", *model), STEPS, delay=int(name == "2bw"))
    assert_close([record["lm_loss"] for record in records], expected.losses, 1e-11, "loss")
    found = saved_tensors(tmp_path / "run")
    for tensor, value in expected.tensors.items():
        assert float((found[tensor] - value).abs().max()) < 1e-10, tensor


HALF = [
    *(("--bf16",), ("--bf16", "--compile"), ("--fp16", "--loss-scaling", "initial=1024")),
    *(("--bf16", "--fp8", "format=hybrid", f"recipe={recipe}") for recipe in ("tensorwise", "delayed")),
]


@pytest.mark.parametrize(
    ("flags", "name"), [*((flags, "gpt") for flags in HALF), *((HALF[0], n) for n in ("documents", "window"))]
)
def test_half_precision_stays_near_the_oracle(flags: tuple[str, ...], name: str, tmp_path: Path) -> None:
    """What hides documents and what is behind a window are kernels of their own in 16 bits."""
    records = run(tmp_path / "run", *MODELS[name], "--no-fp64", *flags)
    expected = reference((*TINY, "--micro-batch-size", "1", *MODELS[name]), STEPS)
    assert_close([record["lm_loss"] for record in records], expected.losses, 2e-2, "loss")


def test_deterministic_mode_repeats_bit_for_bit(tmp_path: Path) -> None:
    flags = ("--num-layers", "4", "--no-fp64", "--bf16", "--hidden-size", "128", "--deterministic-mode")
    first, second = (run(tmp_path / name, *flags) for name in ("one", "two"))
    assert [record["lm_loss"] for record in first] == [record["lm_loss"] for record in second]
    one, two = (saved_tensors(tmp_path / name) for name in ("one", "two"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
