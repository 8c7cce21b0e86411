"""Norms of 1 + weight: to Hugging Face as plain norms that compute the same, to Megatron-LM and back as they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalite.convert import CheckpointSource, HuggingFaceSource, write_checkpoint, write_huggingface
from tests.unit.convert.test_families import our_logits, peer


class OnePlus:
    """A source of the same function, by hand: 1 is taken from the weight of every norm."""

    def __init__(self, source: HuggingFaceSource) -> None:
        self._source, self.model = source, dataclasses.replace(source.model, apply_layernorm_1p=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, name: str) -> Tensor:
        values = self._source.read(name)
        return values - 1 if name.endswith("norm.weight") else values


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_norms_of_one_plus_weight_leave_as_plain_ones(case: str, tmp_path: Path) -> None:
    peer(case).save_pretrained(tmp_path / "theirs")
    write_checkpoint(OnePlus(HuggingFaceSource(tmp_path / "theirs")), tmp_path / "ours")
    write_huggingface(CheckpointSource(tmp_path / "ours"), tmp_path / "back")
    there, back = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert there.keys() == back.keys()
    for name, values in there.items():
        torch.testing.assert_close(back[name], values, rtol=0, atol=1e-15 if "norm" in name else 0)
    write_checkpoint(HuggingFaceSource(tmp_path / "back"), tmp_path / "again")
    torch.testing.assert_close(our_logits(tmp_path / "ours"), our_logits(tmp_path / "again"), rtol=0, atol=1e-12)
