"""The examples as a reader runs them, and what `import megalite` costs and offers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megalite
from tests.cli.typed import run_warm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(*argv: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SMALL = ("custom_schedule", "pipeline_my_model")
LONG = ["pipeline_my_model", "train_from_python", "resnet_pipeline", "huggingface_model"]


@pytest.mark.parametrize("name", ["custom_schedule", *(pytest.param(name, marks=pytest.mark.full) for name in LONG)])
def test_an_example_learns(name: str) -> None:
    done = run_warm(f"examples/{name}.py")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines]
    assert len(losses) == 4 and losses[-1] < (0.75 if name in SMALL else 0.8) * losses[0]
    if name != "resnet_pipeline":  # its batches differ by more than its last steps gain
        assert losses == sorted(losses, reverse=True)


@pytest.mark.full
def test_a_module_of_ones_own_learns(tmp_path: Path) -> None:
    """By the command that its file begins with."""
    command = (ROOT / "examples" / "model_module.py").read_text().split("python ")[1].replace("\\\n", " ")
    folder = tmp_path / "mine"
    run(*command.replace("runs/mine", str(folder)).split(), "--device", "cpu", "--log-interval", "1")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [line["lm_loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < 0.6 * losses[0]
    assert run("examples/model_module.py", str(folder)).startswith("def ")


def test_every_example_is_run() -> None:
    by_ray = {"ray_train"}  # tests/cli/test_launch_files.py
    assert {path.stem for path in EXAMPLES} == {"custom_schedule", "model_module", *LONG} | by_ray


def test_examples_are_short() -> None:
    assert EXAMPLES and all(len(path.read_text().splitlines()) <= 64 for path in EXAMPLES)


def test_import_is_light_and_names_are_there() -> None:
    assert run("-c", "import megalite, sys; dir(megalite); print('torch' in sys.modules)") == "False\n"
    for name in megalite.__all__:
        assert getattr(megalite, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Pipes'"):
        megalite.Pipes  # noqa: B018
