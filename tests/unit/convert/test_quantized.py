"""Weights in MXFP4 and in FP8 blocks become what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.convert import CheckpointSource, HuggingFaceSource, write_checkpoint, write_huggingface
from megalite.convert.quantized import from_blocks, from_mxfp4
from megalite.errors import CheckpointError, ConfigError
from tests.unit.convert.family_cases import CASES
from tests.unit.convert.test_families import peer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def drawn(*shape: int, below: int = 256) -> Tensor:
    return torch.randint(0, below, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def test_mxfp4_is_what_transformers_reads() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = drawn(3, 8, 5, 16), drawn(3, 8, 5, below=250)
    assert torch.equal(from_mxfp4(blocks, scales), convert_moe_packed_tensors(blocks, scales))


def test_mxfp4_by_its_definition() -> None:
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[..., 0], blocks[..., 1] = 0xF1, 0x27  # the lower half of a byte comes first
    found = from_mxfp4(blocks, torch.full((1, 1, 1), 129, dtype=torch.uint8))
    assert found.shape == (1, 32, 1) and found[0, :5, 0].tolist() == [2.0, -24.0, 24.0, 4.0, 0.0]


def test_blocks_of_fp8() -> None:
    weight = torch.randn(5, 7).to(torch.float8_e4m3fn)
    factors = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.25, 8.0]])
    found = from_blocks(weight, factors, (3, 3))
    expected = [[float(weight[i, j]) * float(factors[i // 3, j // 3]) for j in range(7)] for i in range(5)]
    assert torch.equal(found, torch.tensor(expected).to(torch.bfloat16))


def quantized_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """A tiny gpt-oss whose experts are in MXFP4; returns them in bf16."""
    kind, values = CASES["gpt-oss"]
    monkeypatch.setitem(CASES, "gpt-oss", (kind, values | dict(intermediate_size=64)))
    peer("gpt-oss").to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    experts: dict[str, Tensor] = {}
    for layer in range(2):
        for name, out, groups in (("gate_up_proj", 128, 1), ("down_proj", 32, 2)):
            full = f"model.layers.{layer}.mlp.experts.{name}"
            blocks, scales = drawn(4, out, groups, 16), 120 + drawn(4, out, groups, below=10)
            tensors |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
            experts[full] = from_mxfp4(blocks, scales)
            del tensors[full]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return experts


def settings(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_in_mxfp4_goes_out_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = quantized_folder(tmp_path / "there", monkeypatch)
    write_checkpoint(HuggingFaceSource(tmp_path / "there"), tmp_path / "ours")
    write_huggingface(CheckpointSource(tmp_path / "ours"), tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert all(torch.equal(back[name], values) for name, values in experts.items())
    plain = load_file(tmp_path / "there" / "model.safetensors")
    assert all(torch.equal(back[name], plain[name]) for name in back.keys() - experts.keys())


def test_parts_that_do_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized_folder(tmp_path, monkeypatch)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file(
        {**tensors, name: tensors[name][:, :3].contiguous()}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(CheckpointError, match=r"down_proj: blocks \[4, 32, 2, 16\] do not go with scales \[4, 3, 2\]$"):
        write_checkpoint(HuggingFaceSource(tmp_path), tmp_path / "ours")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="tensors are missing: model.layers.1.mlp.experts.down_proj_scales$"):
        HuggingFaceSource(tmp_path)


def test_another_method_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized_folder(tmp_path, monkeypatch)
    settings(tmp_path, quantization_config={"quant_method": "awq"})
    with pytest.raises(ConfigError, match="quantization_config: awq weights are not supported .only mxfp4, and fp8"):
        HuggingFaceSource(tmp_path)
