"""A needle task in packed documents: learned, unseen from other documents, the same at every context-parallel size."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from equivalence.layouts import train_body
from megalite.testing import run_ranks, run_single

SCRIPT = Path(__file__).parents[2] / "scripts" / "needle.py"


def needle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("needle", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(folder: Path, seq_length: int, steps: int, sizes: tuple[int, ...], compared: int) -> None:
    """Trains one process, and the first `compared` steps at every other size; asks the model of the one."""
    script = needle()
    script.write_documents(folder / "needles", 600, seq_length)
    argv = [*script.flags(folder / "needles", seq_length, steps), "--no-exit-signal-handler"]
    losses = run_single(train_body, [*argv, "--save", str(folder / "cp1")], steps, timeout=1200)[0]
    for size in sizes:
        layout = [*argv, "--context-parallel-size", str(size), "--save", str(folder / f"cp{size}")]
        found = run_ranks(train_body, size, layout, compared, timeout=600)[0][0]
        assert found == pytest.approx(losses[:compared], rel=1e-7)
    right = script.answers(folder / "cp1", seq_length)
    assert right["own"] >= 0.9, "it has not learned to look"
    assert right["other"] <= 0.25, "a document sees another one"
    # the test would tell: with the mask off the same model reads the other document's needle
    assert right["unmasked"] >= 0.8


def test_needle(tmp_path: Path) -> None:
    check(tmp_path, 128, 80, (2,), compared=5)


@pytest.mark.full
def test_needle_of_2048_tokens(tmp_path: Path) -> None:
    check(tmp_path, 2048, 150, (2, 4), compared=150)
