"""Plain directories of torch.distributed.checkpoint: torchtitan's Llama and Hugging Face's names, in and out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megalite import strangers
from megalite.checkpoint import CheckpointReader
from megalite.config import parse
from megalite.convert import (
    CheckpointSource,
    DcpSource,
    HuggingFaceSource,
    state_of,
    write_checkpoint,
    write_dcp,
    write_huggingface,
)
from megalite.errors import CheckpointError
from megalite.train.starting_point import offer_of, open_start
from tests.unit.convert.dcp_layout import random_cuts, titan_name
from tests.unit.convert.dcp_layout import write_dcp as written_by_torch
from tests.unit.convert.megatron_layout import HereInstead
from tests.unit.convert.test_megatron import assert_same, peer

HEADS, GROUPS, D = 4, 2, 8


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "Popen", HereInstead)


def turned(rows: Tensor) -> Tensor:
    """Rows whose two halves are rotated together -> rows whose neighbours are, one by one."""
    found = torch.empty_like(rows)
    for head in range(len(rows) // D):
        for i in range(D // 2):
            found[head * D + 2 * i] = rows[head * D + i]
            found[head * D + 2 * i + 1] = rows[head * D + D // 2 + i]
    return found


def titan(model: Any) -> dict[str, Tensor]:
    """The tensors that torchtitan has of a Llama of transformers."""
    return {
        titan_name(name): turned(values) if name.endswith(("q_proj.weight", "k_proj.weight")) else values
        for name, values in model.state_dict().items()
    }


def test_the_order_of_rows_is_that_of_the_rotation() -> None:
    """Scores with neighbours rotated as complex numbers = scores with halves rotated."""
    q, k = torch.randn(2, D, dtype=torch.float64)
    angles = torch.tensor([3.0, 7.0], dtype=torch.float64)[:, None] * 10000.0 ** -(torch.arange(0, D, 2) / D)

    def halves(x: Tensor, at: Tensor) -> Tensor:
        a, b = x.chunk(2)
        return torch.cat([a * at.cos() - b * at.sin(), b * at.cos() + a * at.sin()])

    def neighbours(x: Tensor, at: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.view(-1, 2)) * torch.polar(torch.ones_like(at), at)).flatten()

    expected = halves(q, angles[0]) @ halves(k, angles[1])
    q, k = turned(q[:, None]).flatten(), turned(k[:, None]).flatten()
    assert (neighbours(q, angles[0]) @ neighbours(k, angles[1]) - expected).abs() < 1e-12


@pytest.mark.parametrize("form", ["titan", "hf", "gpt2"])
def test_from_dcp_to_hugging_face(form: str, tmp_path: Path) -> None:
    model = peer("gpt" if form == "gpt2" else "llama")
    state: dict[str, Any] = titan(model) if form == "titan" else {n: t.clone() for n, t in model.state_dict().items()}
    more = {"optimizer.state.norm.weight.exp_avg": torch.ones(3), "train_state": {"step": 4}}
    written_by_torch(tmp_path / "step-4", state | more, random_cuts(state, 1))
    model.config.save_pretrained(tmp_path / "config")
    source = DcpSource(tmp_path / "step-4", tmp_path / "config" / "config.json")
    write_checkpoint(source, tmp_path / "ours")
    write_huggingface(CheckpointSource(tmp_path / "ours"), tmp_path / "back")
    again = type(model).from_pretrained(tmp_path / "back", attn_implementation="eager", dtype="auto")
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_what_is_written_is_read_by_torch(kind: str, tmp_path: Path) -> None:
    model = peer(kind)
    model.save_pretrained(tmp_path / "hf")
    write_dcp(HuggingFaceSource(tmp_path / "hf"), tmp_path / "dcp")
    expected = (
        titan(model) if kind == "llama" else {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    )
    found = {name: torch.empty_like(values) for name, values in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "dcp")
    assert_same(found, {name: values.contiguous() for name, values in expected.items()})
    source, back = HuggingFaceSource(tmp_path / "hf"), DcpSource(tmp_path / "dcp")
    names = CheckpointSource(write_checkpoint(source, tmp_path / "ours")).read
    for name in back._pairs:
        assert torch.equal(back.read(name), names(name)), name


def test_biases_turn_with_the_rows_they_belong_to(tmp_path: Path) -> None:
    """Queries with neighbours rotated = queries with halves rotated, biases included; a config.json of another block is
    refused by what is missing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=GROUPS, max_position_embeddings=16, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "hf")
    write_dcp(HuggingFaceSource(tmp_path / "hf"), tmp_path / "dcp")
    source = DcpSource(tmp_path / "dcp")
    bias = source.files.read("layers.0.attention.wq.bias")
    assert torch.equal(bias, turned(model.state_dict()["model.layers.0.self_attn.q_proj.bias"]))
    ours = HuggingFaceSource(tmp_path / "hf")
    for name in source._pairs:
        assert torch.equal(source.read(name), ours.read(name)), name
    peer("gpt").config.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="tensors are missing: transformer.wte.weight"):
        DcpSource(tmp_path / "dcp", tmp_path / "other" / "config.json")


def test_what_does_not_fit(tmp_path: Path) -> None:
    model = peer("llama")
    state = titan(model)
    written_by_torch(tmp_path / "a", state)
    with pytest.raises(CheckpointError, match="does not say what model it is; give --model-config"):
        DcpSource(tmp_path / "a")
    with pytest.raises(CheckpointError, match="none.json: no such file"):
        DcpSource(tmp_path / "a", tmp_path / "none.json")
    model.config.save_pretrained(tmp_path / "a")
    state["layers.1.attention.wk.weight"] = torch.ones(8, 32)
    missing = state.pop("norm.weight")
    written_by_torch(tmp_path / "b", state)
    with pytest.raises(CheckpointError, match="tensors are missing: model.norm.weight"):
        DcpSource(tmp_path / "b", tmp_path / "a" / "config.json")
    written_by_torch(tmp_path / "c", {**state, "norm.weight": missing})
    with pytest.raises(CheckpointError, match=r"attention.wk.weight: shape \[8, 32\], config.json says \[16, 32\]"):
        write_checkpoint(DcpSource(tmp_path / "c", tmp_path / "a" / "config.json"), tmp_path / "x")


def test_moments_are_converted(tmp_path: Path) -> None:
    """torchtitan's, in its order of rows, with steps as the iteration; of its schedules nothing is claimed."""
    model = peer("llama")
    state = titan(model)
    kinds = {"exp_avg": -2.0, "exp_avg_sq": 3.0}
    more = {f"optimizer.state.{n}.{kind}": t.float() * by for n, t in state.items() for kind, by in kinds.items()}
    more |= {f"optimizer.state.{name}.step": torch.tensor(7.0) for name in state}
    written_by_torch(tmp_path / "step-7", state | more)
    model.config.save_pretrained(tmp_path / "step-7")
    source = DcpSource(tmp_path / "step-7")
    reader = CheckpointReader(write_checkpoint(source, tmp_path / "ours", run=state_of(source)))
    model.save_pretrained(tmp_path / "hf")
    plain = HuggingFaceSource(tmp_path / "hf")
    names = [name for name in reader.names if "/" not in name]
    assert len(reader.names) == 3 * len(names) + 1 and reader.read("optimizer/step").item() == 7
    for name in names:
        assert torch.equal(reader.read(name), plain.read(name).float())
        for kind, by in kinds.items():
            assert torch.equal(reader.read(f"optimizer/{kind}/{name}"), plain.read(name).float() * by), name
    flags = f"--load {reader.path} --use-checkpoint-args --mock-data --micro-batch-size 4 --lr 1e-3 --train-iters 9"
    config = parse(flags.split(), world_size=1, read_offer=offer_of)
    start = open_start(reader.path, config, 1)
    assert start.saved is None and not start.weights_only
    found = start.meta["progress"]
    assert (found["iteration"], found["consumed_samples"], found["schedule_samples"]) == (7, 28, 28)
    assert open_start(
        reader.path, replace(config, checkpoint=replace(config.checkpoint, finetune=True)), 1
    ).weights_only
