"""Megatron-LM's files against transformers and megatron.core: both generations of names, every cut, bit by bit."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from megalite import strangers
from megalite.config.model import ModelConfig
from megalite.config.model_parts import RopeScaling
from megalite.convert import (
    CheckpointSource,
    HuggingFaceSource,
    open_megatron,
    write_checkpoint,
    write_huggingface,
    write_megatron,
    write_torch_dist,
)
from megalite.convert.source import ModelSource
from megalite.data import NullTokenizer
from megalite.errors import ConfigError
from megalite.inventory.layers import parameter_shapes
from tests.unit.convert.megatron_layout import HereInstead, Way, megatron_enum, write_megatron_files

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

V, S, L = 50, 16, 4
GPT2 = dict(vocab_size=V, n_positions=S, n_embd=32, n_layer=L, n_head=4, bos_token_id=0, eos_token_id=0)
LLAMA = dict(
    vocab_size=V, hidden_size=32, num_hidden_layers=L, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=S,
)  # fmt: skip


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "Popen", HereInstead)


def peer(kind: str, **changes: Any) -> Any:
    """A model of transformers in fp64 whose every parameter matters."""
    torch.manual_seed(5)
    if kind == "gpt":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | changes, attn_implementation="eager"))
    else:
        config = transformers.LlamaConfig(**LLAMA | changes, attn_implementation="eager")
        model = transformers.LlamaForCausalLM(config)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def all_tensors(source: ModelSource) -> dict[str, Tensor]:
    return {name: source.read(name) for name in parameter_shapes(source.model)}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]
    assert not different, different


READ = {
    "gpt": ("gpt", {}, Way()),
    "gpt-2019": ("gpt", {}, Way(tp=2, names="2019", version=0)),
    "gpt-version-1": ("gpt", {}, Way(tp=2, names="2019", version=1)),
    "gpt-version-2": ("gpt", {}, Way(names="2019", version=2)),
    "gpt-legacy-2x2": ("gpt", {}, Way(tp=2, pp=2, names="legacy")),
    "gpt-core-tied-copy": ("gpt", {}, Way(tp=4, pp=4)),
    "gpt-untied": ("gpt", dict(tie_word_embeddings=False), Way(tp=2, pp=2, names="core-te")),
    "llama": ("llama", {}, Way(names="core-te")),
    "llama-virtual-stages": ("llama", {}, Way(tp=2, pp=2, vp=2, names="core-te")),
    "llama-legacy": ("llama", {}, Way(tp=2, pp=4, names="legacy")),
    "llama-tied": ("llama", dict(tie_word_embeddings=True), Way(pp=2)),
}


@pytest.mark.parametrize("case", READ)
def test_from_megatron_to_hugging_face(case: str, tmp_path: Path) -> None:
    kind, changes, way = READ[case]
    model = peer(kind, **changes)
    write_megatron_files(tmp_path / "megatron", model, way, zipped=way.version != 0)
    source = open_megatron(tmp_path / "megatron", true_vocab_size=V)
    write_checkpoint(source, tmp_path / "ours")
    write_huggingface(CheckpointSource(tmp_path / "ours"), tmp_path / "back")

    again = type(model).from_pretrained(tmp_path / "back", attn_implementation="eager", dtype="auto").eval()
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    tokens = torch.randint(0, V, (2, S), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_without_a_stated_size_the_padding_stays(tmp_path: Path) -> None:
    """As in Megatron-LM, which lets it take part in the softmax."""
    model = peer("gpt")
    write_megatron_files(tmp_path / "a", model, Way(tp=2))
    source = open_megatron(tmp_path / "a")
    assert source.model.vocab_size == 64
    words = source.read("embedding.word_embeddings.weight")
    assert torch.equal(words[:V], model.state_dict()["transformer.wte.weight"])
    write_megatron_files(tmp_path / "b", model, Way(), tokenizer_type="NullTokenizer", vocab_size=V - 1)
    assert open_megatron(tmp_path / "b").model.vocab_size == V
    with pytest.raises(ConfigError, match="--true-vocab-size=65: the embedding has 64 rows"):
        open_megatron(tmp_path / "a", true_vocab_size=65)
    with pytest.raises(ConfigError, match="--true-vocab-size=0"):
        open_megatron(tmp_path / "a", true_vocab_size=0)


@pytest.mark.parametrize("implementation", ["transformer_engine", "local", "legacy"])
@pytest.mark.parametrize("kind", ["gpt", "llama", "llama-tied"])
def test_to_megatron_and_back_at_any_layout(kind: str, implementation: str, tmp_path: Path, full: bool) -> None:
    model = peer(kind.split("-")[0], **({"tie_word_embeddings": True} if kind == "llama-tied" else {}))
    model.save_pretrained(tmp_path / "hf")
    source = HuggingFaceSource(tmp_path / "hf")
    expected = all_tensors(source)
    sizes = [*product((1, 2), (1, 2)), (1, 4), (4, 1)] if full else [(1, 1), (2, 2)]  # of 2 query groups
    for tp, pp in sizes:
        there = tmp_path / f"{tp}x{pp}"
        write_megatron(source, there, tensor_parallel=tp, pipeline_parallel=pp, implementation=implementation)
        assert (there / "latest_checkpointed_iteration.txt").read_text() == "release"
        assert len(list(there.glob("release/mp_rank_*/model_optim_rng.pt"))) == tp * pp
        back = open_megatron(there)
        assert_same(all_tensors(back), expected)
    write_checkpoint(back, tmp_path / "ours")
    write_huggingface(CheckpointSource(tmp_path / "ours"), tmp_path / "back")
    assert_same(*(load_file(tmp_path / side / "model.safetensors") for side in ("hf", "back")))


def test_stages_of_different_length(tmp_path: Path) -> None:
    """Three layers on the first stage, one on the second: layers are counted, not divided."""
    model = ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=20)
    source: Any = Fixed(model)
    write_megatron(source, tmp_path / "x", pipeline_parallel=2, implementation="local")
    first, second = (tmp_path / f"x/release/mp_rank_00_00{p}/model_optim_rng.pt" for p in (0, 1))
    contents = {file: torch.load(file, weights_only=False) for file in (first, second)}
    weights = contents[second]["model"]
    for name in [name for name in weights if name.startswith("decoder.layers.")]:
        values = weights.pop(name)
        if ".layers.0." in name:
            contents[first]["model"][name.replace(".layers.0.", ".layers.2.")] = values
        else:
            weights[name.replace(".layers.1.", ".layers.0.")] = values
    for file, content in contents.items():
        torch.save(content, file)
    assert_same(all_tensors(open_megatron(tmp_path / "x")), source.tensors)


@pytest.mark.parametrize("way", [Way(tp=2, pp=2, names="legacy"), Way(tp=2, pp=2), Way(pp=4, names="core-te")])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_what_is_written_is_what_the_published_layout_says(kind: str, way: Way, tmp_path: Path) -> None:
    """Name by name, and bit by bit except in the rows of padding."""
    model = peer(kind)
    model.save_pretrained(tmp_path / "hf")
    names = {"legacy": "legacy", "core": "local", "core-te": "transformer_engine"}[way.names]
    source: Any = HuggingFaceSource(tmp_path / "hf")
    write_megatron_files(tmp_path / "expected", model, way)
    source.model = open_megatron(tmp_path / "expected", true_vocab_size=V).model  # its divisor of the vocabulary
    write_megatron(source, tmp_path / "found", tensor_parallel=way.tp, pipeline_parallel=way.pp, implementation=names)
    for file in (tmp_path / "found" / "release").glob("*/*.pt"):
        found = flat(torch.load(file, weights_only=False)["model"])
        like = tmp_path / "expected" / "iter_0000100" / file.parent.name / file.name
        expected = flat(raw(like)["model"])
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name].shape == values.shape and found[name].is_contiguous()
            same = (found[name] == values).flatten(1).all(1) if "embedding" in name or "output" in name else None
            assert torch.equal(found[name], values) if same is None else same.sum() >= min(len(same), 1), name


def flat(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


def raw(file: Path) -> Any:
    """A file of ours that holds an enum of a module that is not there."""
    with pytest.MonkeyPatch.context() as patch:
        megatron_enum(patch)
        return torch.load(file, weights_only=False)


def test_args_of_a_run_that_is_not_ours(tmp_path: Path) -> None:
    tiny = dict(num_layers=2, hidden_size=16, num_attention_heads=4, seq_length=8, vocab_size=20, ffn_hidden_size=32)
    for changes, line in [
        (dict(activation="geglu"), "--activation=geglu"),
        (dict(use_parallel_residual=True), "--use-parallel-residual=True"),
        (dict(activation="gelu-tanh", add_bias_linear=False), "--activation=gelu-tanh"),
        (dict(final_logit_softcapping=30.0), "--final-logit-softcapping=30"),
        (dict(softmax_type="learnable", softmax_type_skip_freq="2"), "--softmax-type-skip-freq="),
        (dict(attn_logit_softcapping=30.0), "--attn-logit-softcapping=30"),
    ]:
        with pytest.raises(ConfigError, match=f"a model with {line}"):
            write_megatron(Fixed(ModelConfig(**tiny | changes)), tmp_path / "x")  # type: ignore[arg-type]
    for cut, line in [
        (dict(tensor_parallel=3), "--target-tensor-model-parallel-size=3: does not divide 4 attention heads"),
        (dict(pipeline_parallel=4), "--target-pipeline-model-parallel-size=4: does not divide 2 layers"),
        (dict(tensor_parallel=0), "--target-tensor-model-parallel-size=0"),
    ]:
        with pytest.raises(ConfigError, match=line):
            write_megatron(Fixed(ModelConfig(**tiny)), tmp_path / "x", **cut)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="legacy.*--qk-layernorm"):
        write_megatron(Fixed(ModelConfig(**tiny, qk_layernorm=True)), tmp_path / "x", implementation="legacy")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="legacy.*--softmax-type=learnable"):
        sinks: Any = Fixed(ModelConfig(**tiny, softmax_type="learnable"))
        write_megatron(sinks, tmp_path / "x", implementation="legacy")
    assert not (tmp_path / "x").exists()


def test_soft_caps_of_megatrons_files_are_refused(tmp_path: Path) -> None:
    """They change what the same weights compute."""
    tiny = dict(num_layers=2, hidden_size=16, num_attention_heads=4, seq_length=8, vocab_size=20, ffn_hidden_size=32)
    write_megatron(Fixed(ModelConfig(**tiny)), tmp_path / "x")  # type: ignore[arg-type]
    file = tmp_path / "x/release/mp_rank_00/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["args"].attn_logit_softcapping = 30.0
    torch.save(content, file)
    with pytest.raises(ConfigError, match=r"args: attn_logit_softcapping '30.0' not supported \(only None\)"):
        open_megatron(tmp_path / "x")


@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
def test_sinks_go_there_and_back(implementation: str, tmp_path: Path) -> None:
    """megatron.core's name, a logit a head, cut with the heads; sinks of 0 are a setting alone."""
    tiny = dict(num_layers=2, hidden_size=16, num_attention_heads=4, seq_length=8, vocab_size=20, ffn_hidden_size=32)
    source: Any = Fixed(ModelConfig(**tiny, softmax_type="learnable"))
    write_megatron(source, tmp_path / "x", tensor_parallel=2, implementation=implementation)
    content = torch.load(tmp_path / "x/release/mp_rank_01/model_optim_rng.pt", weights_only=False)
    found = content["model"]["decoder.layers.1.self_attention.core_attention.softmax_offset"]
    assert torch.equal(found, source.read("layers.1.attention.softmax_offset")[2:])
    assert content["args"].softmax_type == "learnable"
    write_torch_dist(source, tmp_path / "y", implementation=implementation)
    stacked = {"decoder.layers.self_attention.core_attention.softmax_offset": torch.empty(2, 4)}
    dcp.load(stacked, checkpoint_id=tmp_path / "y" / "release")
    for layer, values in enumerate(*stacked.values()):
        assert torch.equal(values, source.read(f"layers.{layer}.attention.softmax_offset"))
    for name in ("x", "y"):
        back = open_megatron(tmp_path / name)
        assert back.model.softmax_type == "learnable"
        assert_same({each: back.read(each) for each in source.tensors}, source.tensors)
    off: Any = Fixed(ModelConfig(**tiny, softmax_type="off-by-one"))
    write_torch_dist(off, tmp_path / "z", implementation=implementation)
    assert open_megatron(tmp_path / "z").model.softmax_type == "off-by-one"


class Fixed:
    """A source of random tensors."""

    tokenizer = NullTokenizer(64)

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(0)
        self.tensors = {name: torch.randn(s, generator=generator) for name, s in parameter_shapes(model).items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def test_settings_that_megatron_has_come_back(tmp_path: Path) -> None:
    model = ModelConfig(
        model_type="llama", num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=16,
        seq_length=8, vocab_size=21, max_position_embeddings=32, position_embedding_type="rope", rotary_base=5e5,
        rotary_percent=0.5, rope_scaling=RopeScaling(
            rotary_seq_len_interpolation_factor=2.0, use_rope_scaling=True, rope_scaling_factor=32.0
        ),
        window_size=5, window_attn_skip_freq="2", no_rope_freq="[1]+[0]",
        normalization="RMSNorm", norm_epsilon=1e-6, activation="squared-relu", add_bias_linear=False,
        add_qkv_bias=True, qk_layernorm=True, ffn_hidden_size=40, apply_layernorm_1p=True,
    )  # fmt: skip
    source: Any = Fixed(model)
    write_megatron(source, tmp_path / "x", tensor_parallel=2, pipeline_parallel=2, dtype=torch.bfloat16)
    back = open_megatron(tmp_path / "x")
    assert back.model.apply_layernorm_1p
    for name in ("kv_channels", "rotary_base", "rotary_percent", "window_size", "norm_epsilon", "activation"):
        assert getattr(back.model, name) == getattr(model, name), name
    assert_same(all_tensors(back), {name: t.bfloat16() for name, t in source.tensors.items()})
    args = torch.load(tmp_path / "x/release/mp_rank_00_000/model_optim_rng.pt", weights_only=False)["args"]
    assert (args.window_attn_skip_freq, args.no_rope_freq) == ([1, 0], [1, 0])
    assert [(back.model.has_window(i), back.model.has_rope(i)) for i in (0, 1)] == [(True, False), (False, True)]
    assert args.window_size == [4, 0] and args.params_dtype == torch.bfloat16 and args.padded_vocab_size == 256


CORE = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None


@pytest.mark.full
@pytest.mark.skipif(not CORE, reason="megatron.core is not installed")
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_megatron_core_loads_it_and_computes_the_same(kind: str, tmp_path: Path) -> None:
    model = peer(kind)
    model.save_pretrained(tmp_path / "hf")
    write_megatron(HuggingFaceSource(tmp_path / "hf"), tmp_path / "there", implementation="local")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_megatron_core.py")), str(tmp_path)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tokens = torch.load(tmp_path / "tokens.pt")
    found = torch.load(tmp_path / "logits.pt")
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    assert ((found - expected).abs().max() / expected.abs().max()).item() < 5e-6
