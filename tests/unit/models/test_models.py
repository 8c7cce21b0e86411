"""Models as lists of layers: names, counts, initial values, tied embeddings, stages cut anywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megalite.comm.mesh import Axis
from megalite.config.model import ModelConfig
from megalite.errors import ConfigError
from megalite.inventory import placement_of
from megalite.inventory.layers import count_parameters
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn.init import logical_normal, logical_parameters
from megalite.parallel.tensor.context import LayerContext

SHAPE: dict[str, Any] = dict(num_layers=3, hidden_size=32, num_attention_heads=4, seq_length=8, vocab_size=50)
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt-untied-no-bias": dict(untie_embeddings_and_output_weights=True, add_bias_linear=False),
    "llama": dict(
        model_type="llama", position_embedding_type="rope", normalization="RMSNorm", activation="swiglu",
        add_bias_linear=False, untie_embeddings_and_output_weights=True, num_query_groups=2, qk_layernorm=True,
    ),
    "odd": dict(activation="geglu", add_qkv_bias=True, kv_channels=6, max_position_embeddings=20, qk_layernorm=True),
}  # fmt: skip


def config_of(variant: str) -> ModelConfig:
    return ModelConfig(**SHAPE, **VARIANTS[variant])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_layers_in_order_are_built_without_memory_where_that_is_asked(variant: str) -> None:
    config = config_of(variant)
    specs = layer_specs(config)
    assert [spec.name for spec in specs] == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    stack = build_stack(config, specs, LayerContext(device="meta"))
    assert all(p.device.type == "meta" for p in stack.parameters())


def test_gpt_has_the_known_number_of_parameters() -> None:
    config = ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024, vocab_size=50257)
    assert count_parameters(config) == 124_439_808  # GPT-2


def test_llama_has_the_known_number_of_parameters() -> None:
    config = ModelConfig(
        num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336,
        seq_length=8192, vocab_size=128256, **{k: v for k, v in VARIANTS["llama"].items() if k not in (
            "num_query_groups", "qk_layernorm")},
    )  # fmt: skip
    assert count_parameters(config) == 8_030_261_248  # Llama 3 8B


def test_logical_names_in_the_order_of_the_model() -> None:
    config = config_of("gpt")
    stack = build_stack(config, layer_specs(config), LayerContext())
    names = [name for name, _ in stack.logical_parameters()]
    block = [
        f"{part}.{kind}"
        for part in ("input_norm", "attention.qkv", "attention.proj", "mlp_norm", "mlp.fc1", "mlp.fc2")
        for kind in ("weight", "bias")
    ]
    assert names == [
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        *(f"layers.{i}.{name}" for i in range(3) for name in block),
        "head.final_norm.weight",
        "head.final_norm.bias",
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_cut_into_stages_is_the_same_model(variant: str) -> None:
    config = config_of(variant)
    specs = layer_specs(config)
    ctx = LayerContext(dtype=torch.float64)
    whole = build_stack(config, specs, ctx, init_seed=4)
    stages = [build_stack(config, specs[a:b], ctx, init_seed=4) for a, b in ((0, 2), (2, 3), (3, 5))]
    tokens = torch.randint(0, 50, (2, 9))
    data = Microbatch(tokens[:, :-1], tokens[:, 1:], torch.arange(8).expand(2, 8), torch.ones(2, 8), torch.arange(2))
    x = None
    for stage in stages:
        x = stage(x, data)
    expected = whole(None, data)
    assert x is not None and torch.equal(x, expected)
    expected.backward()
    x.backward()
    total: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, p in stage.logical_parameters():
            assert p.grad is not None
            total[name] = total.get(name, torch.zeros_like(p)) + p.grad
    for name, p in whole.logical_parameters():
        torch.testing.assert_close(total[name], p.grad, rtol=1e-12, atol=1e-13)


def test_tied_embeddings_are_one_parameter_on_one_stage_and_two_copies_on_two() -> None:
    config = config_of("gpt")
    specs = layer_specs(config)
    whole = build_stack(config, specs, LayerContext(), init_seed=1)
    embedding = whole.get_parameter("embedding.word_embeddings.weight")
    assert whole.get_parameter("head.output.weight") is embedding
    assert embedding.sink_uses == 2  # type: ignore[attr-defined]
    last = build_stack(config, specs[-1:], LayerContext(), init_seed=1)
    copies = dict(logical_parameters(last.get_submodule("head")))
    assert torch.equal(copies["embedding.word_embeddings.weight"], embedding)
    assert not hasattr(copies["embedding.word_embeddings.weight"], "sink_uses")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [2])
def test_initial_values_are_the_same_at_every_layout(variant: str, size: int) -> None:
    config = config_of(variant)
    specs = layer_specs(config)
    whole = dict(build_stack(config, specs, LayerContext(), init_seed=9).logical_parameters())
    for rank in range(size):
        ctx = LayerContext(tp=Axis("tp", size, rank, tuple(range(size))))  # no message is sent: it needs no group
        for name, p in build_stack(config, specs, ctx, init_seed=9).logical_parameters():
            place = placement_of(p)
            valid = place.valid_shape(tuple(p.shape))
            inside = tuple(slice(n) for n in valid)
            there = tuple(slice(a, a + n) for a, n in zip(place.offset, valid, strict=True))
            assert torch.equal(p[inside], whole[name][there]), name
            rest = p.detach().clone()
            rest[inside] = 0
            assert not rest.any(), f"{name}: padding is not zero"


def test_initial_values_follow_the_recipe() -> None:
    config = ModelConfig(num_layers=8, hidden_size=256, num_attention_heads=4, seq_length=64, vocab_size=1000)
    parameters = dict(build_stack(config, layer_specs(config), LayerContext(), init_seed=1).logical_parameters())
    for name, p in parameters.items():
        place = placement_of(p)
        assert place.decay == (p.dim() > 1)
        if name.endswith("bias"):
            assert not p.any()
        elif "norm" in name:
            assert torch.equal(p, torch.ones_like(p))
        else:
            std = 0.02 / math.sqrt(16) if name.endswith(("proj.weight", "fc2.weight")) else 0.02
            p = p[: place.global_shape[0]]
            assert p.std().item() == pytest.approx(std, rel=0.02) and abs(p.mean().item()) < std / 50
    names = [name for name, p in parameters.items() if p.dim() > 1]
    a, b = parameters[names[2]], parameters["layers.1.attention.qkv.weight"]
    assert a.shape == b.shape and not torch.equal(a, b)


def test_a_rectangle_of_a_large_tensor_is_cut_from_the_same_values() -> None:
    """Several blocks of rows, a rectangle that begins and ends inside of blocks."""
    shape = (5000, 700)
    whole, other, part = torch.empty(shape), torch.empty(shape), torch.empty(3000, 50)
    logical_normal("w", shape, (0, 0), std=1.0, seed=3, out=whole)
    logical_normal("w", shape, (0, 0), std=1.0, seed=4, out=other)
    logical_normal("w", shape, (1234, 100), std=1.0, seed=3, out=part)
    assert torch.equal(part, whole[1234:4234, 100:150])
    assert not torch.equal(whole, other)
    assert abs(float(whole.std()) - 1) < 1e-2


def test_the_seed_gives_the_same_values_in_every_release() -> None:
    """Frozen: changing them would change every run that starts from a seed."""
    values = torch.empty(1, 3)
    logical_normal("layers.0.mlp.fc1.weight", (32, 32), (3, 5), std=0.02, seed=1234, out=values)
    frozen = torch.tensor([[0.02448095, -0.00373011, 0.00021409]])
    torch.testing.assert_close(values, frozen, rtol=0, atol=1e-8)


def test_errors_name_the_flag() -> None:
    with pytest.raises(ConfigError, match="--model-type=bert: unknown family; use one of gpt, llama"):
        layer_specs(ModelConfig(**{**SHAPE, "model_type": "bert"}))
    with pytest.raises(ConfigError, match="--vocab-size=0: the vocabulary must be known before a model is built"):
        layer_specs(ModelConfig(**{**SHAPE, "vocab_size": 0}))
