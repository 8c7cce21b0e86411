"""Parameter counts against published models, FLOPs against the closed form of the literature."""

from __future__ import annotations

import dataclasses

import pytest

from megalite.config import ModelConfig
from megalite.config.model import FAMILY_DEFAULTS
from megalite.inventory.layers import count_parameters, flops_per_iteration, parameter_shapes

GPT2 = ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024, vocab_size=50257)
LLAMA_7B = ModelConfig(
    num_layers=32, hidden_size=4096, num_attention_heads=32, seq_length=2048, vocab_size=32000, ffn_hidden_size=11008,
    **FAMILY_DEFAULTS["llama"],
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # As transformers counts the released models.
        (GPT2, 124_439_808),
        (dataclasses.replace(GPT2, num_layers=24, hidden_size=1024, num_attention_heads=16), 354_823_168),
        (dataclasses.replace(GPT2, num_layers=48, hidden_size=1600, num_attention_heads=25), 1_557_611_200),
        (LLAMA_7B, 6_738_415_616),
        (
            dataclasses.replace(LLAMA_7B, num_query_groups=8, ffn_hidden_size=14336, vocab_size=128256),
            8_030_261_248,  # Llama 3 8B
        ),
        (
            dataclasses.replace(
                LLAMA_7B,
                num_layers=28,
                hidden_size=1024,
                num_attention_heads=16,
                num_query_groups=8,
                kv_channels=128,
                ffn_hidden_size=3072,
                vocab_size=151936,
                qk_layernorm=True,
                untie_embeddings_and_output_weights=False,
            ),
            596_049_920,  # Qwen3 0.6B: head width apart from h / a, normalised queries and keys
        ),
    ],
)
def test_published_parameter_counts(model: ModelConfig, parameters: int) -> None:
    assert count_parameters(model) == parameters


def test_shapes_follow_the_switches() -> None:
    plain = parameter_shapes(dataclasses.replace(GPT2, add_bias_linear=False, normalization="RMSNorm"))
    assert not [name for name in plain if name.endswith("bias")]
    biased = parameter_shapes(dataclasses.replace(GPT2, add_bias_linear=False, add_qkv_bias=True))
    assert "layers.0.attention.qkv.bias" in biased and "layers.0.attention.proj.bias" not in biased
    gated = parameter_shapes(dataclasses.replace(GPT2, activation="swiglu"))
    assert gated["layers.0.mlp.fc1.weight"] == (2, 2048, 768)
    grouped = parameter_shapes(dataclasses.replace(GPT2, num_query_groups=4))
    assert grouped["layers.11.attention.qkv.weight"] == ((12 + 2 * 4) * 64, 768)


def test_default_mlp_widths() -> None:
    assert GPT2.ffn_size == 3072
    assert dataclasses.replace(LLAMA_7B, ffn_hidden_size=None).ffn_size == int(4 * 4096 * 2 / 3 / 64) * 64 == 10880


def test_flops_are_the_classic_formula_with_causal_attention() -> None:
    # 72 B s L h^2 (1 + s/(12h) + V/(12 L h)): f = 4h, one key per query, V padded.
    batch, s, layers, h = 8, 1024, 12, 768
    padded = 50304
    expected = 72 * batch * s * layers * h**2 * (1 + s / (12 * h) + padded / (12 * layers * h))
    assert flops_per_iteration(GPT2, batch) == pytest.approx(expected, rel=1e-12)


def test_flops_of_a_gated_grouped_model_by_hand() -> None:
    model = ModelConfig(
        num_layers=2, hidden_size=8, num_attention_heads=4, num_query_groups=2, seq_length=16, vocab_size=10,
        ffn_hidden_size=24, activation="swiglu", make_vocab_size_divisible_by=4,
    )  # fmt: skip
    qkv, proj, mlp = 8 * (8 + 4 + 4), 8 * 8, 3 * 8 * 24
    scores_and_values = 2 * 16 * 8 // 2  # q k^T and p v, causal half, per token and layer
    per_token = 2 * (qkv + proj + mlp + scores_and_values) + 8 * 16
    assert flops_per_iteration(model, 3, tensor_model_parallel_size=2) == 3 * 2 * (3 * 16) * per_token


@pytest.mark.parametrize(("tensor", "padded"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200)])
def test_vocabulary_is_padded_as_megatron_pads_it(tensor: int, padded: int) -> None:
    assert GPT2.padded_vocab_size(tensor) == padded
