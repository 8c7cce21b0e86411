"""Every family against transformers: random weights there -> a checkpoint -> a Hugging Face directory, bit by bit;
logits, loss and every gradient equal to those of transformers in fp64.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.checkpoint import verify_checkpoint
from megalite.config.model import ModelConfig
from megalite.config.model_parts import Experts, RopeScaling
from megalite.convert import CheckpointSource, HuggingFaceSource, hf_files, write_checkpoint, write_huggingface
from megalite.convert.megatron_args import write_args
from megalite.convert.registry import family_of, read_model
from megalite.errors import ConfigError
from megalite.inference.loaded_model import load_for_inference
from megalite.inventory import parameter_shapes, placement_of
from megalite.microbatch import Microbatch
from tests.unit.convert.double_transformers import double_transformers
from tests.unit.convert.family_cases import CASES, GATED, WIDTH, S, V

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

BAR = 1e-12


def in_fp64(case: str) -> dict[str, str]:
    """The library's grouped products have no fp64."""
    sparse = case.startswith(
        ("mixtral", "qwen3-moe", "qwen3-next", "qwen3.5-moe", "olmoe", "gpt-oss", "deepseek", "glm")
    )
    return {"experts_implementation": "eager"} if sparse else {}


def config_class(kind: str) -> Any:
    """Of a model without images."""
    return getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")


def kind_of(case: str) -> type:
    """The class of transformers."""
    kind = CASES[case][0]
    name = next(n for n in (f"{kind}ForCausalLM", f"{kind}LMHeadModel") if hasattr(transformers, n))
    found: type = getattr(transformers, name)
    return found


def peer(case: str) -> Any:
    """A model of transformers whose every parameter matters. It computes in fp64 if it is run in
    `double_transformers(kind_of(case))`."""
    kind, values = CASES[case]
    config = config_class(kind)(**values, attn_implementation="eager", **in_fp64(case))
    torch.manual_seed(3)
    with double_transformers(kind_of(case)):
        model = kind_of(case)(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens() -> Tensor:
    return torch.randint(0, V, (2, S), generator=torch.Generator().manual_seed(0))


def batch() -> Microbatch:
    """Every token is followed by the next one; what follows the last one counts as well."""
    return Microbatch(
        tokens=tokens(),
        labels=tokens().roll(-1, 1),
        positions=torch.arange(S).expand(2, S),
        loss_mask=torch.ones(2, S),
        sample_ids=torch.arange(2),
    )


def our_logits(directory: Path) -> Tensor:
    model = load_for_inference(directory, device="cpu").model
    head: Any = model.get_submodule("head")
    with torch.no_grad():
        logits: Tensor = head.logits(model.body(None, batch())).transpose(0, 1)
    return logits


def our_step(directory: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """(Loss, the gradient of each logical tensor without padding)."""
    model = load_for_inference(directory, device="cpu").model.requires_grad_()
    loss = model(None, batch())
    loss.backward()
    gradients = {}
    for name, parameter in model.logical_parameters():
        assert parameter.grad is not None, name
        valid = placement_of(parameter).valid_shape(tuple(parameter.shape))
        gradients[name] = parameter.grad[tuple(slice(n) for n in valid)]
    return loss.detach(), gradients


def their_results(case: str, directory: Path) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss, gradients of transformers; the model goes to `directory`. Their gradients come to our names as
    weights do: in a Hugging Face directory of their own."""
    with double_transformers(kind_of(case)):
        model = peer(case)
        model.save_pretrained(directory)
        logits = model(input_ids=tokens()).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch().labels.flatten(), reduction="sum")
        loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(directory / "gradients")
    source = HuggingFaceSource(directory / "gradients")
    return logits.detach(), loss.detach(), {name: source.read(name) for name in parameter_shapes(source.model)}


def difference(ours: Tensor, theirs: Tensor, unit: float = 0.0) -> float:
    """The largest, in those of the largest value, or of `unit` if that is larger."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.float64
    return float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), unit)


@contextmanager
def no_warning() -> Iterator[None]:
    """Asserts that nothing inside warns, nor transformers' logger."""
    told: list[str] = []
    listener, logger = logging.Handler(logging.WARNING), logging.getLogger("transformers")
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(listener)
    try:
        with warnings.catch_warnings(action="error"):
            yield
    finally:
        logger.removeHandler(listener)
    short = "original_max_position_embeddings field must be less"  # than the few positions of these models
    assert not [message for message in told if short not in message]


@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bit_equal_and_a_step_is_theirs(case: str, tmp_path: Path) -> None:
    logits, loss, gradients = their_results(case, tmp_path / "there")
    committed = write_checkpoint(HuggingFaceSource(tmp_path / "there"), tmp_path / "ours")
    assert verify_checkpoint(committed) == []

    our_loss, our_gradients = our_step(tmp_path / "ours")
    assert difference(our_logits(tmp_path / "ours"), logits) < BAR
    assert difference(our_loss, loss) < BAR
    assert our_gradients.keys() == gradients.keys()
    unit = 1e-3 * max(float(gradient.abs().max()) for gradient in gradients.values())  # a router of one is not used
    worst = {name: difference(our_gradients[name], expected, unit) for name, expected in gradients.items()}
    assert max(worst.values()) < BAR, {name: value for name, value in worst.items() if value >= BAR}

    write_huggingface(CheckpointSource(tmp_path / "ours"), tmp_path / "back")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("there", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    then, now = (json.loads((tmp_path / side / "config.json").read_text()) for side in ("there", "back"))
    assert then["model_type"] == now["model_type"]
    worked_out = ("head_dim",) if "kv_lora_rank" in then else ()
    for key in {"n_inner", "head_dim"}.difference(worked_out):  # as read: absent and null stay what they were
        assert then.get(key) == now.get(key), key

    with double_transformers(kind_of(case)), no_warning():
        again, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "back", output_loading_info=True, attn_implementation="eager", dtype="auto", **in_fp64(case)
        )
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        assert again.dtype == torch.float64
        with torch.no_grad():
            assert torch.equal(again.eval()(input_ids=tokens()).logits, logits)


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3"])
def test_config_json_loses_no_entry(case: str, tmp_path: Path) -> None:
    peer(case).save_pretrained(tmp_path / "source")
    write_huggingface(HuggingFaceSource(tmp_path / "source"), tmp_path / "export")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "export"))
    assert {name: value for name, value in before.items() if after.get(name, ...) != value} in (
        {},
        {"max_window_layers": 28},  # of a model without windows: its number of layers says the same
    )


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_text_of_a_model_with_images_is_read(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As published: names under the language model, experts of a layer in one tensor."""
    vision = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=32)
    values = CASES["qwen3.5" if kind == "Qwen3_5" else "qwen3.5-moe"][1]
    config = getattr(transformers, f"{kind}Config")(text_config=values, vision_config=vision)
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    file, stacked = tmp_path / "whole" / "model.safetensors", whole.state_dict()
    tensors = {n: t for n, t in load_file(file).items() if ".experts." not in n}
    tensors |= {name: t.clone() for name, t in stacked.items() if ".experts." in name}
    save_file(tensors, file, metadata={"format": "pt"})
    source = HuggingFaceSource(tmp_path / "whole")
    assert "tensors for images are left out" in caplog.text
    write_huggingface(source, tmp_path / "text")
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    assert type(text).__name__ == f"{kind}ForCausalLM"
    with torch.no_grad():
        assert torch.equal(text(input_ids=tokens()).logits, whole(input_ids=tokens()).logits)


def test_many_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = peer("llama")
    model.save_pretrained(tmp_path / "there", max_shard_size="20KB")
    assert (tmp_path / "there" / "model.safetensors.index.json").is_file()
    monkeypatch.setattr(hf_files, "MAX_SHARD_ELEMENTS", 3000)
    write_checkpoint(HuggingFaceSource(tmp_path / "there"), tmp_path / "ours")
    write_huggingface(CheckpointSource(tmp_path / "ours"), tmp_path / "back")
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 3
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True, dtype="auto"
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_an_odd_number_of_turned_channels_is_named() -> None:
    """transformers turns one more than the share says there; that is no RoPE of ours."""
    values = WIDTH | dict(intermediate_size=64, model_type="gpt_neox", rotary_pct=0.4)
    with pytest.raises(
        ConfigError, match="^c: rotary_pct '0.4' turns 3 of a head's 8 channels; only an even number is$"
    ):
        read_model(values, "c")
    assert read_model(values | {"rotary_pct": 0.5}, "c")[1].rotary_dim == 4


def test_an_olmoe_that_clips_is_named() -> None:
    values = GATED | dict(model_type="olmoe", num_experts=4, num_experts_per_tok=2)
    model = read_model(values, "c")[1]
    assert (model.norm_epsilon, model.qk_layernorm_across_heads) == (1e-5, True)
    assert family_of(model).name == "olmoe"
    with pytest.raises(ConfigError, match=r"^c: clip_qkv '8.0' not supported \(only null\)$"):
        read_model(values | {"clip_qkv": 8.0}, "c")


def test_megatron_has_no_norm_across_heads() -> None:
    model = read_model(GATED | dict(model_type="olmoe", num_experts=4, num_experts_per_tok=2), "c")[1]
    with pytest.raises(ConfigError, match="qk-layernorm-across-heads"):
        write_args(dataclasses.replace(model, experts=Experts()), "transformer_engine")


def test_megatron_has_no_other_first_length() -> None:
    scaling = RopeScaling(use_rope_scaling=True, rope_scaling_original_length=4096)
    shape = dict(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=20)
    model = ModelConfig(**shape, position_embedding_type="rope", rope_scaling=scaling)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rope_scaling_original_length|rope-scaling-original-length"):
        write_args(model, "transformer_engine")


def test_megatron_has_no_yarn() -> None:
    scaling = RopeScaling(use_rope_scaling=True, rope_scaling_type="yarn")
    shape = dict(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=20)
    model = ModelConfig(**shape, position_embedding_type="rope", rope_scaling=scaling)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"^not written for Megatron-LM \(local\): a model with --rope-scaling-type=yarn"
    ):
        write_args(model, "local")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            dict(layer_types=["full_attention"]),
            "c: layer_types .* is not a list of 2 of full_attention, sliding_attention",
        ),
        (dict(layer_types=["full_attention", "chunked"]), "c: layer_types .* is not a list of 2"),
        (
            dict(use_sliding_window=False, layer_types=["full_attention", "sliding_attention"]),
            "c: layer_types .* not supported without use_sliding_window",
        ),
        (dict(max_window_layers=-1), "c: max_window_layers '-1' is not a number of layers"),
        (dict(sliding_window=None), "c: sliding_window is missing"),
    ],
)
def test_windows_of_layers_that_make_no_sense(changes: dict[str, Any], line: str) -> None:
    values = GATED | dict(model_type="qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(ConfigError, match=f"^{line}"):
        read_model(values | changes, "c")


def test_a_mistral_has_one_window() -> None:
    """A model of unlike layers is none of theirs: refused by name, not written without the pattern."""
    model = read_model(GATED | dict(model_type="mistral", sliding_window=4), "c")[1]
    with pytest.raises(ConfigError, match=r"no Hugging Face family has.*--window-attn-skip-freq=\[1\]\+\[0\]"):
        family_of(dataclasses.replace(model, window_attn_skip_freq="2"))
    with pytest.raises(ConfigError, match="no Hugging Face family has this model; .*--softmax-type=learnable"):
        family_of(dataclasses.replace(model, softmax_type="learnable"))
    with pytest.raises(ConfigError, match=r"no Hugging Face family has this model; .*--no-rope-freq=\[0\]\+\[1\]"):
        family_of(dataclasses.replace(model, no_rope_freq="2"))
