"""Adapters whose checksums are right and whose words are not: one line, and nothing that is not there is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import convert_checkpoint
from megalite.checkpoint.format import MANIFEST
from megalite.convert import AdaptedSource, open_checkpoint
from megalite.errors import MegaliteError
from megalite.inference import load_for_inference
from pretrain_gpt import main
from tests.unit.inference.test_hostile_checkpoints import BAD, GONE, RUN, changed, commit

MODEL, BASE = ("meta", "config", "model"), ("meta", "base")
LIES: list[tuple[tuple[str, ...], Any, str]] = [
    *(
        ((*MODEL, "lora_rank"), value, r"is \[2, 8\], \[\d+, 8\] by its configuration")
        for value in (1, 3, 10**9, 2**62)
    ),
    *(((*MODEL, "lora_rank"), value, "lora_rank") for value in (0, -1, "x", 1.5, float("nan"), [])),
    *(((*MODEL, "lora_alpha"), value, "lora_alpha") for value in (0, -1, "x", float("nan"), float("inf"), [1])),
    *(
        ((*MODEL, "lora_targets"), value, "lora_targets")
        for value in (["../../x"], [[]], 3, ["linear_qkv\n"], ["linear_proj"])
    ),
    *(((*BASE, "path"), value, ".") for value in ("/dev", "../../../etc", "a\0b", "\ud800", "", "x" * 10**5, 7, [])),
    ((*BASE, "digest"), "", "adapters of another model"),
    ((*BASE, "digest"), None, "the place of a model"),
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert main([*RUN, "--save", str(folder / "base"), "--exit-interval", "2"]) == 0
    lora = ["--load", str(folder / "base"), "--lora-rank", "2"]
    assert main([*RUN, *lora, "--save", str(folder / "lora"), "--exit-interval", "2"]) == 0
    return next((folder / "lora").glob("iter_*"))


def read_all(checkpoint: Path) -> int:
    source = open_checkpoint(checkpoint)
    assert isinstance(source, AdaptedSource)
    return sum(1 for layer in ("attention.qkv", "mlp.fc1") for _ in source.adapters(f"layers.0.{layer}"))


def test_the_original_is_read(original: Path) -> None:
    assert read_all(original) == 2


def test_a_base_that_is_a_run_is_to_be_exported_first(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = original.parent.parent / "base", tmp_path / "adapter"
    convert_checkpoint.main(["--from", "megalite", "--to", "peft", "--load", str(original), "--save", str(adapter)])
    advice = f"--from megalite --to hf --load {base}"
    assert f"export the base, a run ({advice}" in capsys.readouterr().out
    with pytest.raises(MegaliteError, match=f"^--base={base}: is a run, .*{advice}"):
        load_for_inference(adapter, base=base)
    assert main([*RUN, "--load", str(adapter), "--use-checkpoint-args"]) == 2
    assert f"--load={adapter}: adapters of peft, no model; name the run" in capsys.readouterr().err


@pytest.mark.parametrize(("at", "value", "says"), LIES)
def test_a_lie_is_refused(at: tuple[str, ...], value: Any, says: str, original: Path, tmp_path: Path) -> None:
    document = json.loads((original / MANIFEST).read_bytes())
    with pytest.raises(MegaliteError, match=says) as caught:
        read_all(commit(changed(document, at, value), original, tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [*BAD, GONE], ids=lambda value: repr(value)[:20])
def test_any_shape_and_place_may_lie(value: Any, original: Path, tmp_path: Path) -> None:
    document = json.loads((original / MANIFEST).read_bytes())
    name = next(name for name in document["tensors"] if name.endswith("qkv.lora_a"))
    for at in (("tensors", name), ("tensors", name, "shape"), ("tensors", name, "dtype")):
        with pytest.raises(MegaliteError):
            read_all(commit(changed(document, at, value), original, tmp_path))
