"""Model cards and what a push would publish: names of the Hub and no path, whatever a stranger's files say."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from megalite.config import ModelConfig
from megalite.convert import CheckpointSource, Origin, is_hub_id, write_huggingface
from megalite.convert.adapters import BaseModel
from megalite.convert.model_card import model_card
from megalite.convert.source import staged
from tests.unit.inference.tiny_checkpoint import tiny_model_config, write_checkpoint
from tools.command_line import run_tool
from tools.convert_checkpoint import main

NAMES = ("meta-llama/Llama-3.2-1B", "gpt2", "a/b", "org_1/x.y-z", "A" * 96 + "/" + "b" * 96)
NO_NAMES = (
    "", "/", "/root/models/llama", "./llama", "../llama", "~/llama", "models/llama/", "a/b/c", "C:\\models", "a b/c",
    "a/b\n", "a/b\nlicense: mit", "a/é", "-a/b", "a/.b", "file:a", "https://huggingface.co/a/b", "a/b: c", "a" * 97,
    "a/\0",
)  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES, *NO_NAMES])
def test_only_names_of_the_hub_reach_a_card(name: str) -> None:
    known = name in NAMES
    assert is_hub_id(name) == known
    assert Origin.from_meta({"model_type": "llama", "hub_id": name}).hub_id == (name if known else None)
    assert BaseModel.of_meta({"base": {"path": "/x", "hub_id": name}}, "here").hub_id == (name if known else None)


@pytest.mark.parametrize("name", [name for name in NO_NAMES if "\0" not in name])
def test_a_name_that_is_none_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--from", "megalite", "--to", "peft", "--load", "a", "--save", "b", f"--base-hub-id={name}"]
    assert run_tool(main, flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --base-hub-id=") and "give ORG/NAME" in error and error.count("\n") == 1


def test_a_folder_here_is_not_taken_for_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    sides = ["--from", "megalite", "--load", "a", "--save", "b", "--base-hub-id", "models/llama"]
    assert run_tool(main, [*sides, "--to", "peft"]) == 2
    assert "is a folder here, and a path is nothing to others" in capsys.readouterr().err
    assert run_tool(main, [*sides, "--to", "megatron"]) == 2
    assert "--base-hub-id=models/llama: only with --to hf or --to peft" in capsys.readouterr().err


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_exports_have_the_mode_of_any_new_file(umask: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run")
    before = os.umask(umask)
    try:
        export = write_huggingface(CheckpointSource(tmp_path / "run"), tmp_path / "export")
        with staged(tmp_path / "other", model=tiny_model_config(), dtype=None) as staging:
            (staging / "folder").mkdir()
            (staging / "folder" / "file").touch(mode=0o600)
    finally:
        os.umask(before)
    files = [*export.iterdir(), tmp_path / "other" / "folder" / "file"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~umask}
    assert not [path for path in (tmp_path / "other").iterdir() if path.is_file()], "nothing of the probe is left"


def test_a_card_says_what_is_known_and_no_more(tmp_path: Path) -> None:
    """Of a checkpoint that was not trained by a run, of random weights, of a model without a name."""
    model: ModelConfig = tiny_model_config()
    card = model_card(model, "gpt2", Origin(), None, None, adapters=False)
    assert "Converted with megalite" in card and "base_model" not in card and "iterations" not in card
    assert "# Gpt2 model" not in card and "# A gpt2 model" in card
    unnamed = model_card(model, "gpt2", Origin("gpt2"), None, None, adapters=False)
    assert "a gpt2 model, whose name on the Hub is not recorded" in unnamed
    write_checkpoint(tmp_path / "run")
    assert CheckpointSource(tmp_path / "run").facts is None
    config = json.loads(
        (write_huggingface(CheckpointSource(tmp_path / "run"), tmp_path / "x") / "config.json").read_text()
    )
    assert config["bos_token_id"] == config["eos_token_id"] == 256
