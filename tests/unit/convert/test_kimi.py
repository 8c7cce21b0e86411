"""Kimi K2's folders: DeepSeek-V3's layers under a name of their own, with one group of experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from unit.convert import test_families as families
from unit.convert.family_cases import CASES

from megalite.convert import CheckpointSource, HuggingFaceSource, write_checkpoint, write_huggingface


def test_kimi_k2_is_read_as_itself_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, values = CASES["deepseek"]
    monkeypatch.setitem(CASES, "deepseek", (kind, values | dict(n_group=1, topk_group=1, routed_scaling_factor=2.827)))
    there = tmp_path / "there"
    logits, loss, gradients = families.their_results("deepseek", there)
    config = json.loads((there / "config.json").read_text())
    (there / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    write_checkpoint(HuggingFaceSource(there), tmp_path / "ours")
    our_loss, our_gradients = families.our_step(tmp_path / "ours")
    assert families.difference(families.our_logits(tmp_path / "ours"), logits) < families.BAR
    assert families.difference(our_loss, loss) < families.BAR
    unit = 1e-3 * max(float(gradient.abs().max()) for gradient in gradients.values())
    assert our_gradients.keys() == gradients.keys()
    assert all(
        families.difference(our_gradients[n], expected, unit) < families.BAR for n, expected in gradients.items()
    )

    write_huggingface(CheckpointSource(tmp_path / "ours"), tmp_path / "back")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("there", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "kimi_k2"
