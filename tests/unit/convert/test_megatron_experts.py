"""Megatron-LM's files of models with experts: three ways to name them, every cut, bit by bit, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite import strangers
from megalite.config.model import ModelConfig
from megalite.config.model_parts import Experts
from megalite.convert import CheckpointSource, open_megatron, write_checkpoint, write_megatron
from megalite.convert.source import stored_shapes
from megalite.data import NullTokenizer
from megalite.errors import CheckpointError, ConfigError
from tests.unit.convert.megatron_layout import HereInstead

E, F, H, L = 4, 12, 16, 2
SIGMOID = Experts(
    num_experts=E, moe_ffn_hidden_size=F, moe_shared_expert_intermediate_size=8, moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True, moe_router_topk_scaling_factor=2.5, moe_router_num_groups=2,
    moe_router_group_topk=1, moe_aux_loss_coeff=0.01, moe_router_load_balancing_type="seq_aux_loss",
)  # fmt: skip
MIXED = Experts(num_experts=E, moe_ffn_hidden_size=F, moe_layer_freq="[0]+[1]", moe_z_loss_coeff=0.1)
COMMON: dict[str, Any] = dict(
    num_layers=L, hidden_size=H, num_attention_heads=4, seq_length=8, vocab_size=20, ffn_hidden_size=32,
    make_vocab_size_divisible_by=4,
)  # fmt: skip
GATED = dict(activation="swiglu", model_type="llama")
MODELS = {
    "gated, shared, biases": ModelConfig(**COMMON, **GATED, experts=SIGMOID),
    "plain, dense and sparse blocks": ModelConfig(**COMMON, experts=MIXED),
}
CUTS = {
    "one file": {},
    "ep2": dict(expert_parallel=2),
    "tp2 ep4": dict(tensor_parallel=2, expert_parallel=4),
    "tp2 pp2 ep2": dict(tensor_parallel=2, pipeline_parallel=2, expert_parallel=2),
    "tp2 ep2 etp1": dict(tensor_parallel=2, expert_parallel=2, expert_tensor_parallel=1),
}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "Popen", HereInstead)


class Fixed:
    """A source of random tensors."""

    tokenizer = NullTokenizer(64)

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(0)
        self.tensors = {name: torch.randn(s, generator=generator) for name, s in stored_shapes(model).items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def read_all(directory: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    source = open_megatron(directory)
    return source.model, {name: source.read(name) for name in stored_shapes(source.model)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


def opened(directory: Path, rank: str) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(directory / "release" / rank / "model_optim_rng.pt", weights_only=False)
    return content


@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, cut: str, implementation: str, tmp_path: Path) -> None:
    source: Any = Fixed(MODELS[name])
    write_megatron(source, tmp_path / "x", implementation=implementation, **CUTS[cut])  # type: ignore[arg-type]
    model, found = read_all(tmp_path / "x")
    assert_same(found, source.tensors)
    given, back = source.model.experts, model.experts
    assert replace(back, moe_layer_freq="1") == replace(given, moe_layer_freq="1")
    assert model.sparse_layers == source.model.sparse_layers


def test_names_and_parts_are_megatrons(tmp_path: Path) -> None:
    """By megatron.core's own rules: `SequentialMLP`, `TEGroupedMLP`, `get_checkpoint_name`."""
    source: Any = Fixed(MODELS["gated, shared, biases"])
    fc1, fc2 = (source.tensors[f"layers.1.mlp.experts.{part}.weight"] for part in ("fc1", "fc2"))
    write_megatron(source, tmp_path / "te", tensor_parallel=2, pipeline_parallel=2, expert_parallel=2)
    ranks = {f"mp_rank_{t:02d}_{p:03d}_{e:03d}" for t in range(2) for p in range(2) for e in range(2)}
    assert {path.name for path in (tmp_path / "te/release").iterdir()} == ranks
    content = opened(tmp_path / "te", "mp_rank_01_001_001")
    weights, half = content["model"], F // 2
    gate, value = fc1[3]  # expert 3 is the second of the second expert rank; tensor rank 1 has the second half
    before = "decoder.layers.0.mlp."
    assert torch.equal(weights[before + "experts.linear_fc1.weight1"], torch.cat([gate[half:], value[half:]]))
    assert torch.equal(weights[before + "experts.linear_fc2.weight0"], fc2[2][:, half:])
    assert torch.equal(weights[before + "router.weight"], source.tensors["layers.1.mlp.router.weight"])
    assert torch.equal(weights[before + "router.expert_bias"], source.tensors["layers.1.mlp.router.expert_bias"])
    shared = source.tensors["layers.1.mlp.shared_experts.fc2.weight"]
    assert torch.equal(weights[before + "shared_experts.linear_fc2.weight"], shared[:, 4:])
    norm = "decoder.layers.0.pre_mlp_layernorm.weight"
    assert norm in weights and before + "linear_fc1.layer_norm_weight" not in weights
    empty = {name for name, values in weights.items() if values is None and ".mlp." in name}
    assert empty == {
        f"{before}{e}.linear_{fc}._extra_state" for e in ("experts", "shared_experts") for fc in ("fc1", "fc2")
    }
    args = content["args"]
    assert (args.num_experts, args.moe_layer_freq, args.expert_model_parallel_size) == (E, [1, 1], 2)
    assert (args.expert_tensor_parallel_size, args.moe_grouped_gemm, args.moe_router_topk) == (2, True, 2)
    write_megatron(source, tmp_path / "local", expert_parallel=2, implementation="local")
    weights = opened(tmp_path / "local", "mp_rank_00_001")["model"]
    assert torch.equal(weights[before + "experts.local_experts.1.linear_fc2.weight"], source.tensors[
        "layers.0.mlp.experts.fc2.weight"][3])  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_experts_in_one_matrix_are_read(name: str, tmp_path: Path) -> None:
    """megatron.core's `GroupedMLP`: `weight1` is `[h, n up]`, used as `[n, h, up]`; `weight2` `[n f, h]`. No biases."""
    model = replace(MODELS[name], add_bias_linear=False)
    source: Any = Fixed(model)
    write_megatron(source, tmp_path / "x", tensor_parallel=2, expert_parallel=2, implementation="local")
    for t in range(2):
        for e in range(2):
            file = tmp_path / f"x/release/mp_rank_{t:02d}_{e:03d}/model_optim_rng.pt"
            content = torch.load(file, weights_only=False)
            weights = content["model"]
            for layer in (i for i in range(L) if model.sparse_layers[i]):
                before = f"decoder.layers.{layer}.mlp.experts."
                each = {
                    fc: [weights.pop(f"{before}local_experts.{n}.linear_{fc}.weight") for n in range(2)]
                    for fc in ("fc1", "fc2")
                }
                weights[before + "weight1"] = torch.stack([w.t() for w in each["fc1"]]).reshape(H, -1)
                weights[before + "weight2"] = torch.stack([w.t() for w in each["fc2"]]).reshape(-1, H)
            torch.save(content, file)
    assert_same(read_all(tmp_path / "x")[1], source.tensors)


def test_ranks_that_hold_whole_experts_need_not_be_a_grid(tmp_path: Path) -> None:
    """Tensor parallelism of 2 over the dense layers and none over experts, on two ranks: 0 has the first experts, 1 the
    others."""
    source: Any = Fixed(MODELS["gated, shared, biases"])
    write_megatron(source, tmp_path / "x", tensor_parallel=2, expert_parallel=2, expert_tensor_parallel=1)
    for other in ("mp_rank_00_001", "mp_rank_01_000"):
        shutil.rmtree(tmp_path / "x/release" / other)
    assert_same(read_all(tmp_path / "x")[1], source.tensors)


def test_bf16_leaves_the_bias_exact_and_our_checkpoint_has_it(tmp_path: Path) -> None:
    source: Any = Fixed(MODELS["gated, shared, biases"])
    write_megatron(source, tmp_path / "x", dtype=torch.bfloat16)
    back: Any = open_megatron(tmp_path / "x")
    write_checkpoint(back, tmp_path / "ours", dtype=torch.float16)
    ours = CheckpointSource(tmp_path / "ours")
    name = "layers.1.mlp.router.expert_bias"
    assert torch.equal(ours.read(name), source.tensors[name])
    assert ours.read("layers.1.mlp.router.weight").dtype == torch.float16


def changed(directory: Path, rank: str, change: Any) -> None:
    content = opened(directory, rank)
    change(content)
    torch.save(content, directory / "release" / rank / "model_optim_rng.pt")


def test_what_is_wrong_with_files_is_said(tmp_path: Path) -> None:
    source: Any = Fixed(MODELS["gated, shared, biases"])
    write_megatron(source, tmp_path / "x", expert_parallel=2)
    first, second = "mp_rank_00_000", "mp_rank_00_001"
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight1"

    def put(**values: Any) -> Any:
        return lambda content: content["args"].__dict__.update(values)

    for case, (changes, error, line) in enumerate([
        ({second: lambda c: c["model"].pop(name)}, CheckpointError, "shape|missing|numbered"),
        ({second: lambda c: c["model"].update({name: torch.zeros(3, 3)})}, CheckpointError, "args say a part of"),
        ({first: put(expert_model_parallel_size=4)}, CheckpointError, "say 1 x 1 x 4 ranks.*1 x 1 x 2 are there"),
        ({first: put(moe_shared_expert_gate=True)}, ConfigError, "moe_shared_expert_gate True not supported|'True'"),
        ({first: put(moe_router_load_balancing_type="sinkhorn")}, ConfigError, "moe_router_load_balancing_type"),
        ({first: put(moe_expert_capacity_factor=1.0)}, ConfigError, "moe_expert_capacity_factor"),
        ({first: put(moe_layer_freq=[1])}, ConfigError, "moe_layer_freq"),
        ({first: put(num_experts=1)}, ConfigError, "num_experts"),
        ({first: put(expert_tensor_parallel_size=3)}, CheckpointError, "expert_tensor_parallel_size 3"),
        ({first: put(expert_tensor_parallel_size=0)}, CheckpointError, "expert_tensor_parallel_size 0"),
        ({first: put(expert_tensor_parallel_size=[])}, CheckpointError, r"expert_tensor_parallel_size \[\]"),
    ]):  # fmt: skip
        directory = tmp_path / f"case{case}"
        shutil.copytree(tmp_path / "x", directory)
        for rank, change in changes.items():
            changed(directory, rank, change)
        with pytest.raises(error, match=line):
            open_megatron(directory)
    shutil.rmtree(tmp_path / "x/release" / second)
    with pytest.raises(CheckpointError, match="say 1 x 1 x 2 ranks"):
        open_megatron(tmp_path / "x")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    sparse, dense = MODELS["gated, shared, biases"], ModelConfig(**COMMON)
    for model, cut, line in [
        (sparse, dict(expert_parallel=3), "--target-expert-model-parallel-size=3: does not divide 4 experts"),
        (
            sparse,
            dict(tensor_parallel=4, expert_tensor_parallel=2),
            "--target-expert-tensor-parallel-size=2: neither 1",
        ),
        (dense, dict(expert_parallel=2), "--target-expert-model-parallel-size=2: the model has no experts"),
        (sparse, dict(implementation="legacy"), "legacy.*num_experts '4'"),
    ]:
        with pytest.raises(ConfigError, match=line):
            write_megatron(Fixed(model), tmp_path / "x", **cut)  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()
