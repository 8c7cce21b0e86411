"""Adapters beside Hugging Face models: `peft` trains the same ones, loads ours; merged they are one model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence.layouts import TINY
from safetensors.torch import load_file, save_file

from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.config import Config
from megalite.config.cli import parse
from megalite.convert import (
    AdaptedSource,
    HuggingFaceSource,
    PeftSource,
    adapters,
    open_checkpoint,
    write_huggingface,
    write_peft,
)
from megalite.convert.llama import LLAMA
from megalite.convert.peft import PEFT_WEIGHTS
from megalite.errors import CheckpointError, ConfigError
from megalite.inference import load_for_inference
from megalite.train import offer_of
from megalite.train.run import open_run
from megalite.train.run_data import open_data, resolve_tokenizer
from tests.unit.convert.double_transformers import double_transformers
from tests.unit.convert.family_cases import S, V
from tests.unit.convert.test_families import CASES, kind_of, our_logits, peer, tokens

STEPS = 5
SCALE = 7 / 3
TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"], "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]}


def configuration(base: Path, case: str, *more: str) -> Config:
    shape = ("--hidden-size", "--num-attention-heads", "--seq-length")
    flags = [f for i, f in enumerate(TINY) if f not in shape and (i == 0 or TINY[i - 1] not in shape)]
    flags += f"--micro-batch-size 8 --use-checkpoint-args --seq-length {S} --vocab-size {V} --load {base}".split()
    own = [] if any("kind=" in flag for flag in more) else ["--lora-alpha", "7", "--lora-targets", *TARGETS[case]]
    flags += ["--lora-rank", "3", *own, *more]
    return parse(flags, world_size=1, read_offer=offer_of)


def fine_tune(base: Path, case: str, save: Path, *more: str) -> AdaptedSource:
    """Five steps of ours from the Hugging Face model."""
    with open_run(configuration(base, case, "--save", str(save), *more), World()) as run:
        for step in range(STEPS):
            run.trainer.train_step(drain=step == STEPS - 1)
        run.state.save(run.trainer.progress)
    source = open_checkpoint(save)
    assert isinstance(source, AdaptedSource)
    return source


def in_fp64(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers computes rotary angles and RMSNorms in fp32 whatever the model is in."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            monkeypatch.setattr(module, "forward", rms_norm(module))
    model.config._experts_implementation = "eager"  # which multiplies in any dtype
    model.config._attn_implementation = "sdpa"  # whose softmax is in the dtype of the rest
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    if rotary is not None:
        monkeypatch.setattr(rotary, "forward", rotary_angles(model.config))
    return model


def rms_norm(module: Any) -> Any:
    return lambda x: module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


def rotary_angles(config: Any) -> Any:
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rates = config.rope_parameters["rope_theta"] ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)

    def forward(x: Any, position_ids: Any, **_: Any) -> Any:
        angles = torch.cat([position_ids[..., None] * rates] * 2, -1)
        return angles.cos(), angles.sin()

    return forward


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_five_steps_are_those_of_peft(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same initial values, data, clipping and AdamW: the same adapters, in fp64 to 1e-10."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    peer(case).save_pretrained(tmp_path / "base")
    config = configuration(tmp_path / "base", case)
    with open_run(configuration(tmp_path / "base", case, "--save", str(tmp_path / "start")), World()) as run:
        run.state.save(run.trainer.progress)
    write_peft(open_checkpoint(tmp_path / "start"), tmp_path / "begin")
    ours = fine_tune(tmp_path / "base", case, tmp_path / "run")
    model = peft.PeftModel.from_pretrained(in_fp64(peer(case), monkeypatch), tmp_path / "begin", is_trainable=True)
    model = model.double()
    begin = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    train_there(model, config)
    write_peft(ours, tmp_path / "end")
    found = load_file(tmp_path / "end" / "adapter_model.safetensors")
    there = {name.replace(".default", ""): (p, begin[name]) for name, p in model.named_parameters() if p.requires_grad}
    assert there.keys() == found.keys()
    for name, (value, before) in there.items():
        assert (value - found[name]).abs().max() < 1e-10, name
        assert (value - before).abs().max() > 1e-3, name


def train_there(model: Any, config: Config) -> None:
    config, tokenizer = resolve_tokenizer(config)
    data = open_data(config, ParallelMesh.single(), tokenizer, World(), earlier_requests=())
    settings = config.optimizer
    parameters = [p for p in model.parameters() if p.requires_grad]
    betas = (settings.args.adam_beta1, settings.args.adam_beta2)
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.lr, betas=betas, eps=settings.args.adam_eps, weight_decay=settings.weight_decay
    )
    with data.train_loader(0) as loader:
        for _ in range(STEPS):
            (batch,) = loader.next_batch(config.global_batch_size(1))
            loss = F.cross_entropy(model(input_ids=batch.tokens).logits.flatten(0, 1), batch.labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, settings.clip_grad)
            optimizer.step()


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_merged_weights_are_base_and_adapters(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers with merged weights, and with base + scale * B A put together by their own names, is our model."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    peer(case).save_pretrained(tmp_path / "base")
    source = fine_tune(tmp_path / "base", case, tmp_path / "run")
    write_huggingface(source, tmp_path / "merged", dtype=torch.float64)
    write_peft(source, tmp_path / "adapter")
    read = transformers.AutoModelForCausalLM.from_pretrained
    by_hand = read(tmp_path / "base", dtype=torch.float64)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert math.isclose(told["lora_alpha"] / told["r"], SCALE) and told["fan_in_fan_out"] == (case == "gpt2")
    for name in (name for name in stored if "lora_A" in name):
        weight = by_hand.get_submodule(name.split("base_model.model.")[1].split(".lora_")[0]).weight.data
        change = SCALE * stored[name.replace("lora_A", "lora_B")] @ stored[name]
        assert change.abs().max() > 1e-3, name
        weight += change.t() if case == "gpt2" else change
    expected = our_logits(tmp_path / "run")
    for model in (read(tmp_path / "merged", dtype=torch.float64), by_hand):
        with torch.no_grad():
            found = in_fp64(model.eval(), monkeypatch)(input_ids=tokens()).logits
        assert (found - expected).abs().max() < 1e-11
    write_huggingface(source, tmp_path / "rounded")
    sources = HuggingFaceSource(tmp_path / "rounded"), PeftSource(tmp_path / "adapter", tmp_path / "base")
    for name in sources[1]._pairs:
        merged, beside = (each.read(name) for each in sources)
        assert (merged - beside).abs().max() < 1e-6, name
    assert (
        load_for_inference(tmp_path / "adapter", base=tmp_path / "base").config.model.num_layers
        == sources[0].model.num_layers
    )


@pytest.mark.parametrize(
    ("case", "flags"), [("mixtral", "--lora-shared-a"), pytest.param("qwen3-moe", "", marks=pytest.mark.full)]
)
def test_adapters_of_experts_are_those_of_peft(
    case: str, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft beside the base is transformers with merged weights, in fp64 to 1e-11, and both are our model to 1e-6: their
    routers compute in fp32."""
    transformers, peft = (pytest.importorskip(name, reason="not installed") for name in ("transformers", "peft"))
    peer(case).save_pretrained(tmp_path / "base")
    TARGETS[case] = ["linear_qkv", "linear_fc1", "linear_fc2"] if flags else ["linear_proj", "linear_fc2"]
    source = fine_tune(tmp_path / "base", case, tmp_path / "run", *flags.split())
    write_huggingface(source, tmp_path / "merged", dtype=torch.float64)
    write_peft(source, tmp_path / "adapter")
    read, expected = transformers.AutoModelForCausalLM.from_pretrained, our_logits(tmp_path / "run")
    base = read(tmp_path / "base", dtype=torch.float64)
    with torch.no_grad():
        moved = (in_fp64(base.eval(), monkeypatch)(input_ids=tokens()).logits - expected).abs().max()
        assert moved > 1e-2, "the adapters change what the model says"
        beside = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", torch_device="cpu")
        merged = in_fp64(read(tmp_path / "merged", dtype=torch.float64).eval(), monkeypatch)
        found = [model(input_ids=tokens()).logits for model in (beside, merged)]
        assert (found[0] - found[1]).abs().max() < 1e-11
        assert (found[0] - expected).abs().max() < 1e-6


@pytest.mark.parametrize(
    "targets",
    [
        "linear_proj linear_fc1 linear_fc2",
        *(pytest.param(t, marks=pytest.mark.full) for t in ("linear_fc1", "down_proj")),
    ],
)
def test_adapters_of_gpt_oss_are_merged_and_those_of_peft(
    targets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts are transposed, gate and value alternating: peft beside the base, and transformers with merged
    weights, are our model in fp64 to 1e-11."""
    transformers, peft = (pytest.importorskip(name, reason="not installed") for name in ("transformers", "peft"))
    peer("gpt-oss").save_pretrained(tmp_path / "base")
    monkeypatch.setitem(TARGETS, "gpt-oss", targets.split())
    source = fine_tune(tmp_path / "base", "gpt-oss", tmp_path / "run")
    write_huggingface(source, tmp_path / "merged", dtype=torch.float64)
    write_peft(source, tmp_path / "adapter")
    read, expected = transformers.AutoModelForCausalLM.from_pretrained, our_logits(tmp_path / "run")
    with torch.no_grad(), double_transformers(kind_of("gpt-oss")):
        base, merged = (
            read(tmp_path / name, dtype=torch.float64, experts_implementation="eager").eval()
            for name in ("base", "merged")
        )
        plain, found = (model(input_ids=tokens()).logits for model in (base, merged))
        beside = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", torch_device="cpu")(
            input_ids=tokens()
        ).logits
    assert (plain - expected).abs().max() > 1e-3, "the adapters change what the model says"
    assert (found - expected).abs().max() < 1e-11 and (beside - expected).abs().max() < 1e-11


def test_an_adapter_without_a_place_is_no_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose rules have no layer for it, and a weight that no adapter of it belongs to, are refused."""
    peer("llama").save_pretrained(tmp_path / "base")
    fine_tune(tmp_path / "base", "llama", tmp_path / "run")
    rules = tuple(rule for rule in LLAMA.rules if not rule.ours.endswith("fc2"))
    with monkeypatch.context() as patch:
        patch.setattr("megalite.convert.peft.family_of", lambda model, name: replace(LLAMA, rules=rules))
        with pytest.raises(ConfigError, match=r"--to=peft: layers.0.mlp.fc2.adapters.fc2.lora_a \(and 3 more\): this"):
            write_peft(open_checkpoint(tmp_path / "run"), tmp_path / "adapter")
    shapes = adapters.stored_shapes
    monkeypatch.setattr(
        adapters, "stored_shapes", lambda model: {n: s for n, s in shapes(model).items() if "fc2" not in n}
    )
    with pytest.raises(
        ConfigError, match=r"layers.0.mlp.fc2.adapters.fc2.lora_a .* no place for it; use the run itself"
    ):
        write_huggingface(open_checkpoint(tmp_path / "run"), tmp_path / "merged")
    assert not (tmp_path / "adapter").exists() and not (tmp_path / "merged").exists()


@pytest.mark.full
def test_dense_layers_beside_experts_are_not_left_out_in_silence(tmp_path: Path) -> None:
    peer("qwen3-moe-mixed").save_pretrained(tmp_path / "base")
    TARGETS["qwen3-moe-mixed"] = ["linear_fc2"]
    source = fine_tune(tmp_path / "base", "qwen3-moe-mixed", tmp_path / "run")
    with pytest.raises(ConfigError, match=r"peft forgets those of .*layers.0.mlp.down_proj; export merged"):
        write_peft(source, tmp_path / "adapter")


@pytest.mark.parametrize("case", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_a_prefix_is_that_of_peft(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft's logits with the exported prefix are ours, in fp64 to 1e-11, and so is the text that a cache makes."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    if case == "gpt2":
        kind, values = CASES[case]
        monkeypatch.setitem(CASES, case, (kind, {**values, "n_positions": 2 * S}))
    base = in_fp64(peer(case).double().eval(), monkeypatch)
    base.save_pretrained(tmp_path / "base")
    more = ("--max-position-embeddings", "64") if case == "llama" else ()
    source = fine_tune(tmp_path / "base", case, tmp_path / "run", "--lora", "kind=prefix", "--lr", "1", *more)
    write_peft(source, tmp_path / "adapter")
    plain = base(input_ids=tokens()).logits
    beside = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", torch_device="cpu").double().eval()
    rounded = beside.prompt_encoder["default"].embedding.weight  # peft reads them in fp32
    exact = load_file(tmp_path / "adapter" / "adapter_model.safetensors")["prompt_embeddings"]
    assert (rounded - exact).abs().max() < 1e-6
    rounded.data = exact
    with torch.no_grad():
        found, expected = beside(input_ids=tokens()).logits, our_logits(tmp_path / "run")
    assert (found - expected).abs().max() < 1e-11
    assert (plain - expected).abs().max() > 1e-3, "the prefix changes what the model says"
    with pytest.raises(ConfigError, match="merges into no matrix, .*export it --to peft, or use the run itself"):
        write_huggingface(source, tmp_path / "merged")


def test_exported_adapters_know_their_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One weight of the model is another: refused. Saved again without the digest, they are read with a note."""
    model = peer("llama")
    model.save_pretrained(tmp_path / "base")
    source = fine_tune(tmp_path / "base", "llama", tmp_path / "run")
    write_peft(source, tmp_path / "adapter")
    for number in range(8):  # safetensors orders a header's metadata anew each time
        again = write_peft(source, tmp_path / f"adapter{number}") / PEFT_WEIGHTS
        assert again.read_bytes() == (tmp_path / "adapter" / PEFT_WEIGHTS).read_bytes()
    model.lm_head.weight.data[0, 0] += 1
    model.save_pretrained(tmp_path / "other")
    PeftSource(tmp_path / "adapter", tmp_path / "base")
    assert "no digest" not in caplog.text
    with pytest.raises(CheckpointError, match=r"adapters of another model than .*other \(digest .*; give that"):
        PeftSource(tmp_path / "adapter", tmp_path / "other")
    save_file(load_file(tmp_path / "adapter" / PEFT_WEIGHTS), tmp_path / "adapter" / PEFT_WEIGHTS)
    PeftSource(tmp_path / "adapter", tmp_path / "other")
    assert "other is that one is not known" in caplog.text


def test_a_bottleneck_stays_in_its_run(tmp_path: Path) -> None:
    peer("llama").save_pretrained(tmp_path / "base")
    source = fine_tune(tmp_path / "base", "llama", tmp_path / "run", "--lora", "kind=bottleneck")
    with pytest.raises(ConfigError, match="--to=peft: it has no --adapter-kind=bottleneck; use the run itself"):
        write_peft(source, tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"merges into no matrix, .* it; use the run itself \(generate_text.py"):
        write_huggingface(source, tmp_path / "merged")
    assert not (tmp_path / "adapter").exists() and not (tmp_path / "merged").exists()
    assert our_logits(tmp_path / "run").isfinite().all()


def adapters_with(folder: Path, settings: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Adapters of rank 2 of the first query of a Llama of the tests, changed."""
    folder.mkdir()
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    plain = {f"{layer}.lora_A.weight": torch.ones(2, 32), f"{layer}.lora_B.weight": torch.ones(32, 2)}
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 4, **settings}))
    save_file(plain if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def test_adapters_of_peft_are_read_beside_their_model_alone(tmp_path: Path) -> None:
    peer("llama").save_pretrained(tmp_path / "base")
    base = HuggingFaceSource(tmp_path / "base")
    name = "layers.0.attention.qkv.weight"
    width = base._pairs[name].form.to_theirs(base.model, base.read(name))[0].shape
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    good = {f"{layer}.lora_A.weight": torch.ones(2, width[1]), f"{layer}.lora_B.weight": torch.ones(width[0], 2)}
    for number, (settings, scale) in enumerate([({}, 2.0), ({"use_rslora": True}, 4 / math.sqrt(2))]):
        source = PeftSource(adapters_with(tmp_path / f"good{number}", settings, good), tmp_path / "base")
        changed = (source.read(name) - base.read(name)).double()
        assert (changed.flatten().sort().values[-1] - 2 * scale).abs() < 1e-6 and changed.count_nonzero() == math.prod(
            width
        )
    peer("llama").bfloat16().save_pretrained(tmp_path / "half")
    small = {key: value / 256 for key, value in good.items()}  # a sum that bf16 would lose
    source = PeftSource(adapters_with(tmp_path / "small", {}, small), tmp_path / "half")
    exact = HuggingFaceSource(tmp_path / "half").read(name).float()
    assert (source.read(name) - exact).abs().max() == pytest.approx(2 * 2.0 / 256**2, rel=1e-3)
    other = {key.replace("q_proj", "z_proj"): value for key, value in good.items()}
    wide = {**good, f"{layer}.lora_A.weight": torch.ones(2, width[1] + 1)}
    half = {key: value for key, value in good.items() if "lora_A" in key}
    strange = {**good, f"{layer}.lora_magnitude_vector": torch.ones(2)}
    wrong: list[tuple[dict[str, Any], dict[str, torch.Tensor], str]] = [
        ({"peft_type": "IA3"}, good, "peft_type is 'IA3', and plain LoRA alone is read"),
        ({"use_dora": True}, good, "use_dora is 'True'"),
        ({"bias": "all"}, good, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, good, "modules_to_save is"),
        ({"alpha_pattern": {"q_proj": 3}}, good, "alpha_pattern is"),
        ({"lora_alpha": "many"}, good, "lora_alpha is no number"),
        ({}, other, "z_proj.weight, which .* does not have"),
        ({}, half, "are no pair"),
        ({}, strange, "lora_magnitude_vector is no matrix of plain LoRA"),
    ]
    for number, (settings, tensors, why) in enumerate(wrong):
        with pytest.raises(CheckpointError, match=why):
            PeftSource(adapters_with(tmp_path / f"bad{number}", settings, tensors), tmp_path / "base")
    with pytest.raises(CheckpointError, match="it belongs to another model"):
        PeftSource(adapters_with(tmp_path / "wide", {}, wide), tmp_path / "base").read(name)
    with pytest.raises(ConfigError, match="without their model; name it by --base DIR"):
        load_for_inference(tmp_path / "good0")
    with pytest.raises(ConfigError, match="no Hugging Face model .*which adapters of peft belong to"):
        load_for_inference(tmp_path / "good0", base=tmp_path)
    (tmp_path / "good0" / "adapter_model.safetensors").rename(tmp_path / "good0" / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"not found; adapter_model.bin is a pickle"):
        load_for_inference(tmp_path / "good0", base=tmp_path / "base")
