"""Megatron-LM's `torch_dist`: against transformers with torch's own writer, against megatron.core; hostile files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from equivalence.layouts import saved_tensors
from torch import Tensor

from megalite import strangers
from megalite.checkpoint import CheckpointReader
from megalite.config import Experts, ModelConfig
from megalite.config.cli import parse
from megalite.convert import (
    CheckpointSource,
    HuggingFaceSource,
    KeptState,
    MegatronDistSource,
    open_megatron,
    state_of,
    write_checkpoint,
    write_huggingface,
    write_torch_dist,
)
from megalite.convert.dcp_files import DcpFiles
from megalite.convert.source import AdamRun, stored_shapes
from megalite.errors import MegaliteError
from megalite.train.param_schedules import ParamSchedules, resolve_schedules
from megalite.train.starting_point import offer_of, open_start
from tests.unit.convert.dcp_layout import change_metadata, made_torch_dist, random_cuts, stacked, write_dcp
from tests.unit.convert.megatron_layout import HereInstead
from tests.unit.convert.test_megatron import Fixed, S, V, assert_same, peer


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "Popen", HereInstead)


READ: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt": ("gpt", {}, {}),
    "gpt-one-by-one": ("gpt", {}, dict(mixed=True)),
    "llama": ("llama", {}, dict(as_object=True)),
    "llama-tied": ("llama", dict(tie_word_embeddings=True), dict(seed=3)),
}


@pytest.mark.parametrize("case", READ)
def test_from_torch_dist_to_hugging_face(case: str, tmp_path: Path) -> None:
    kind, changes, how = READ[case]
    model = peer(kind, **changes)
    made_torch_dist(tmp_path / "megatron", model, **how)
    source = open_megatron(tmp_path / "megatron", true_vocab_size=V)
    write_checkpoint(source, tmp_path / "ours")
    write_huggingface(CheckpointSource(tmp_path / "ours"), tmp_path / "back")
    again = type(model).from_pretrained(tmp_path / "back", attn_implementation="eager", dtype="auto").eval()
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    tokens = torch.randint(0, V, (2, S), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_rectangles_are_put_together_as_torch_does(tmp_path: Path) -> None:
    """Every cut of a tensor, whole and at leading indices; and the plain values of an object."""
    generator = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {
        "a": torch.randn(3, 4, 5, generator=generator), "b": torch.randn(7, 2, generator=generator).bfloat16(),
        "c": torch.tensor(2.5), "d": torch.arange(6.0), "o": {"x": [1, 2.5, None, "text"]},
    }  # fmt: skip
    write_dcp(tmp_path, state, random_cuts(state, 2))
    files = DcpFiles(tmp_path)
    for name in "abcd":
        assert torch.equal(files.read(name), state[name]), name
    assert torch.equal(files.read("a", (2,)), state["a"][2]) and torch.equal(files.read("a", (1, 3)), state["a"][1, 3])
    assert files.content("o") == state["o"]
    assert len(files.tensors["a"].chunks) > 1


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_what_is_written_is_the_published_layout(kind: str, tmp_path: Path) -> None:
    """Read by torch's own reader, name by name; and read here again."""
    model = peer(kind)
    model.save_pretrained(tmp_path / "hf")
    source = HuggingFaceSource(tmp_path / "hf")
    write_torch_dist(source, tmp_path / "there", dtype=torch.float32)
    assert (tmp_path / "there/latest_checkpointed_iteration.txt").read_text() == "release"
    expected = {name: values.float() for name, values in stacked(model).items()}
    rows = {name: 128 if "embedding.word" in name or "output" in name else len(t) for name, t in expected.items()}
    found = {name: torch.empty(rows[name], *t.shape[1:]) for name, t in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "there/release")
    for name, values in expected.items():
        assert torch.equal(found[name][: min(V, len(values))], values[:V]), name
    back = open_megatron(tmp_path / "there")
    assert {name.split("/")[0] for name in back.files.objects} == {  # type: ignore[union-attr]
        f"decoder.layers.{layer}._extra_state"
        for layer in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    names = stored_shapes(source.model)
    assert_same({name: back.read(name) for name in names}, {name: source.read(name).float() for name in names})


@pytest.mark.parametrize("freq", ["1", "[0]+[1]"])
@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
def test_experts_are_written_and_read_again(implementation: str, freq: str, tmp_path: Path) -> None:
    experts = Experts(num_experts=3, moe_ffn_hidden_size=6, moe_layer_freq=freq, moe_shared_expert_intermediate_size=8,
                      moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")  # fmt: skip
    model = ModelConfig(
        model_type="llama", num_layers=2, hidden_size=16, num_attention_heads=4, seq_length=8, vocab_size=20,
        ffn_hidden_size=24,
        activation="swiglu", add_bias_linear=False, normalization="RMSNorm", experts=experts,
    )  # fmt: skip
    source = Fixed(model)
    source.tensors |= {n: torch.randn(s) for n, s in stored_shapes(model).items() if n not in source.tensors}
    write_torch_dist(source, tmp_path / "x", implementation=implementation)  # type: ignore[arg-type]
    back = open_megatron(tmp_path / "x")
    assert_same({name: back.read(name) for name in source.tensors}, source.tensors)
    name = "decoder.layers.1.pre_mlp_layernorm.weight" if freq != "1" else "decoder.layers.pre_mlp_layernorm.weight"
    assert (name in back.files.tensors) == (implementation == "transformer_engine")  # type: ignore[union-attr]


def written_with_state(root: Path, **changes: Any) -> Path:
    """Masters and moments that are functions of the weights, number by number."""
    weights = stacked(peer("llama"))
    more = {f"optimizer.state.{kind}.{key}": of(t).float() for key, t in weights.items() for kind, of in STATE.items()}
    groups = [{"lr": 1e-3, "step": 97.0}]
    scheduler = dict(
        max_lr=1e-3, min_lr=1e-4, lr_warmup_steps=64, num_steps=776, lr_decay_style="cosine", lr_decay_steps=8000,
        start_wd=0.01, end_wd=0.1, wd_incr_style="linear", wd_incr_steps=8000,
    )  # fmt: skip
    scaler = changes.pop("grad_scaler", None)
    optimizer = {"optimizer": {"param_groups": groups}, **({"grad_scaler": scaler} if scaler else {})}
    common = {"optimizer": optimizer, "opt_param_scheduler": scheduler}
    args = dict(
        seed=5, global_batch_size=8, micro_batch_size=2, consumed_train_samples=800, bf16=True, optimizer="adam"
    )
    return made_torch_dist(root, peer("llama"), more=more, common=common | changes.pop("common", {}), **args | changes)


STATE: dict[str, Callable[[Tensor], Tensor]] = {
    "param": lambda t: t + 1, "exp_avg": lambda t: -2 * t, "exp_avg_sq": lambda t: t * t,
}  # fmt: skip


def test_masters_and_moments_come_along(tmp_path: Path) -> None:
    written_with_state(tmp_path / "megatron")
    source = open_megatron(tmp_path / "megatron", true_vocab_size=V)
    assert isinstance(source, MegatronDistSource)
    path = write_checkpoint(source, tmp_path / "ours", run=state_of(source))
    found = saved_tensors(tmp_path / "ours")
    for name in stored_shapes(source.model):
        weights = source.read(name)
        assert torch.equal(found.pop(name), (weights + 1).float())
        assert torch.equal(found.pop(f"optimizer/exp_avg/{name}"), (-2 * weights).float())
        assert torch.equal(found.pop(f"optimizer/exp_avg_sq/{name}"), (weights * weights).float())
    assert not found
    reader = CheckpointReader(path)
    assert reader.read("optimizer/step").item() == 97 and reader.manifest.step == 100
    meta = reader.manifest.meta
    assert meta["progress"] == {
        "iteration": 100, "consumed_samples": 800, "updates": 100, "microbatches": 100, "skipped_iterations": 3,
        "schedule_samples": 776,
    }  # fmt: skip
    theirs = ParamSchedules.from_meta(meta["opt_param_scheduler"], "x")
    assert theirs.learning_rate(64) == 1e-3 and theirs.learning_rate(8000) == 1e-4
    assert theirs.weight_decay(4000) == pytest.approx(0.055)
    flags = (
        f"--load {path} --use-checkpoint-args --mock-data --micro-batch-size 1 --global-batch-size 8 --bf16 "
        "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 8 --start-weight-decay 0.01 "
        "--weight-decay 0.1 --end-weight-decay 0.1 --weight-decay-incr-style linear --train-iters 1000"
    )
    config = parse(flags.split(), world_size=1, read_offer=offer_of)
    start = open_start(path, config, 1)
    assert start.saved is not None and start.saved.training.precision.bf16
    settled = resolve_schedules(config, 1, start)  # the same, said in iterations
    assert settled.origin == "checkpoint" and settled.schedules.learning_rate == theirs.learning_rate


def test_masters_and_moments_go_there_and_back(tmp_path: Path) -> None:
    scaler = {"scale": torch.tensor([2.0**21]), "growth_tracker": 311, "hysteresis_tracker": 1}
    rate = dict(lr_warmup_init=1e-7, lr_wsd_decay_style="linear", lr_wsd_decay_samples=16, decoupled_lr=2e-3)
    written_with_state(tmp_path / "megatron", bf16=False, fp16=True, grad_scaler=scaler, **rate)
    source = open_megatron(tmp_path / "megatron", true_vocab_size=V)
    assert isinstance(source, MegatronDistSource)
    first = write_checkpoint(source, tmp_path / "ours", run=state_of(source))
    ours = CheckpointSource(tmp_path / "ours")
    write_torch_dist(ours, tmp_path / "there", run=KeptState.of(ours))
    back = open_megatron(tmp_path / "there")
    assert isinstance(back, MegatronDistSource) and back.directory.name == "iter_0000100"
    second = write_checkpoint(back, tmp_path / "again", run=state_of(back))
    assert_same(*(saved_tensors(tmp_path / name) for name in ("ours", "again")))
    one, other = (CheckpointReader(path).manifest.meta for path in (first, second))
    assert one["progress"] == other["progress"]
    assert one["opt_param_scheduler"] == other["opt_param_scheduler"]
    assert one["loss_scaler"] == other["loss_scaler"] == {"scale": 2.0**21, "good_steps": 311, "tolerance": 1}
    there = torch.load(back.directory / "common.pt", weights_only=False)["optimizer"]["grad_scaler"]
    groups = torch.load(back.directory / "common.pt", weights_only=False)["optimizer"]["optimizer"]["param_groups"]
    assert [(g["wd_mult"], g["max_lr"], g["min_lr"]) for g in groups] == [
        (1, 1e-3, 1e-4),
        (0, 1e-3, 1e-4),
        (1, 2e-3, 1e-4),
    ]
    assert other["opt_param_scheduler"]["decoupled"]["lr"] == 2e-3
    assert there == scaler and there["scale"].shape == (1,)
    assert CheckpointReader(second).read("optimizer/step").item() == 97
    assert KeptState.of(ours).dtype == torch.float16  # type: ignore[union-attr]
    write_checkpoint(source, tmp_path / "weights")
    assert KeptState.of(CheckpointSource(tmp_path / "weights")) is None


def test_moments_of_sinks_go_there_and_back(tmp_path: Path) -> None:
    written_with_state(tmp_path / "megatron")
    source = open_megatron(tmp_path / "megatron", true_vocab_size=V)
    assert isinstance(source, MegatronDistSource) and (like := state_of(source)) is not None
    shape = dict(num_layers=2, hidden_size=16, num_attention_heads=4, seq_length=8, vocab_size=20, ffn_hidden_size=24)
    model: Any = Fixed(ModelConfig(**shape, softmax_type="learnable"))  # type: ignore[arg-type]
    model.origin = source.origin
    run = run_of(model, like)
    write_checkpoint(model, tmp_path / "ours", run=run)
    ours = CheckpointSource(tmp_path / "ours")
    write_torch_dist(ours, tmp_path / "there", run=KeptState.of(ours))
    back = open_megatron(tmp_path / "there")
    assert isinstance(back, MegatronDistSource) and (again := state_of(back)) is not None
    assert sum("softmax_offset" in name for name in again.names) == 3 * 2
    assert_same({name: again.stored(name) for name in again.names}, {name: run.stored(name) for name in run.names})
    key = "optimizer.state.exp_avg.decoder.layers.self_attention.core_attention.softmax_offset"
    assert torch.equal(back.files.read(key)[1], -2 * model.read("layers.1.attention.softmax_offset"))


def run_of(source: Fixed, like: Any) -> AdamRun:
    """A run that goes on as `like` does, whose masters and moments are functions of the weights."""

    class Run(AdamRun):
        model, where, steps, iteration, meta = source.model, "", 97, like.iteration, like.meta
        config = dataclasses.replace(like.config, model=source.model)

        def part(self, kind: str, name: str) -> Tensor:
            return STATE[kind or "param"](source.read(name))

    return Run()


@pytest.mark.parametrize("apart", [False, True])
def test_moments_of_experts_go_there_and_back(apart: bool, tmp_path: Path) -> None:
    """apart: as megatron.core has them where ranks share the experts, in a second optimizer."""
    scaler = {"scale": torch.tensor([2.0**21]), "growth_tracker": 311, "hysteresis_tracker": 1}
    written_with_state(tmp_path / "megatron", bf16=False, fp16=True, grad_scaler=scaler)
    source = open_megatron(tmp_path / "megatron", true_vocab_size=V)
    assert isinstance(source, MegatronDistSource)
    like = state_of(source)
    assert like is not None
    experts: Any = Fixed(
        ModelConfig(
            model_type="llama", num_layers=2, hidden_size=16, num_attention_heads=4, seq_length=8, vocab_size=20,
            ffn_hidden_size=24, activation="swiglu", add_bias_linear=False, normalization="RMSNorm",
            experts=Experts(num_experts=3, moe_ffn_hidden_size=6, moe_layer_freq="[0]+[1]"),
        )
    )  # fmt: skip
    experts.origin = source.origin
    run = run_of(experts, like)
    write_checkpoint(experts, tmp_path / "ours", run=run)
    ours = CheckpointSource(tmp_path / "ours")
    write_torch_dist(ours, tmp_path / "there", run=KeptState.of(ours, apart))
    back = open_megatron(tmp_path / "there")
    assert isinstance(back, MegatronDistSource)
    again = state_of(back)
    assert again is not None and (again.steps, again.iteration) == (97, 100)
    assert again.meta["loss_scaler"] == like.meta["loss_scaler"] != {}
    assert_same({name: again.stored(name) for name in again.names}, {name: run.stored(name) for name in run.names})
    optimizer = torch.load(back.directory / "common.pt", weights_only=False)["optimizer"]
    parts = [optimizer[0], optimizer[1]] if apart else [optimizer]
    assert len(optimizer) == 2 or not apart
    flags = [{group["is_expert_parallel"] for group in part["optimizer"]["param_groups"]} for part in parts]
    assert flags == ([{False}, {True}] if apart else [{False}])


def test_settings_of_a_run_go_there_and_back(tmp_path: Path) -> None:
    """A decay as long as the training is what Megatron-LM writes where none was given."""
    length = dict(train_iters=1500, lr_decay_iters=1000, lr_decay_samples=None, lr_warmup_iters=8, split="98,1,1")
    written_with_state(tmp_path / "megatron", **length)
    source = open_megatron(tmp_path / "megatron", true_vocab_size=V)
    assert isinstance(source, MegatronDistSource)
    write_checkpoint(source, tmp_path / "ours", run=state_of(source))
    ours = CheckpointSource(tmp_path / "ours")
    kept = KeptState.of(ours)
    write_torch_dist(ours, tmp_path / "there", run=kept)
    back = open_megatron(tmp_path / "there")
    assert isinstance(back, MegatronDistSource)
    assert {name: back.common["args"][name] for name in length} == length
    again = state_of(back)
    assert again is not None and kept is not None and again.config == kept.config
    optimizer = again.config.optimizer
    assert (optimizer.lr_decay.lr_decay_iters, optimizer.lr_warmup.lr_warmup_iters) == (1000, 8)
    assert again.config.training.length.train_iters == 1500 and again.config.data.split == "98,1,1"
    written_with_state(tmp_path / "whole", **length | {"train_iters": 1000})
    whole = open_megatron(tmp_path / "whole", true_vocab_size=V)
    assert isinstance(whole, MegatronDistSource)
    state = state_of(whole)
    assert state is not None and state.config.optimizer.lr_decay.lr_decay_iters is None


def test_state_that_is_not_taken_along(tmp_path: Path) -> None:
    def line(number: int, drop: str = "", **changes: Any) -> str:
        there = tmp_path / str(number)
        directory = written_with_state(there, **changes)
        change_metadata(
            directory,
            lambda m: [m.state_dict_metadata.pop(n) for n in list(m.state_dict_metadata) if drop and drop in n],
        )
        source = open_megatron(there, true_vocab_size=V)
        assert isinstance(source, MegatronDistSource)
        with pytest.raises(MegaliteError) as caught:
            write_checkpoint(source, there / "ours", run=state_of(source))
        return str(caught.value)

    assert "optimizer 'sgd' not supported" in line(1, optimizer="sgd")
    assert "exp_avg_sq of layers.0.input_norm.weight is missing" in line(2, "exp_avg_sq.decoder.layers.self_attention")
    assert "dp_reshardable); save it with --dist-ckpt-optim-fully-reshardable" in line(3, ".exp_avg.")
    assert "how many steps" in line(4, common={"optimizer": {}})
