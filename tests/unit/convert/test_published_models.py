"""Configurations of models as they were published: their sizes, their layers, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megalite.convert.registry import family_of, read_model
from megalite.errors import ConfigError
from megalite.inventory import count_parameters

GEMMA3_27B = dict(
    model_type="gemma3_text", num_hidden_layers=62, hidden_size=5376, intermediate_size=21504, num_attention_heads=32,
    num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168, sliding_window=1024, vocab_size=262208,
    max_position_embeddings=131072, rope_scaling={"factor": 8.0, "rope_type": "linear"}, rope_theta=1e6,
)  # fmt: skip
GEMMA3_4B = GEMMA3_27B | dict(
    num_hidden_layers=34, hidden_size=2560, intermediate_size=10240, num_attention_heads=8, num_key_value_heads=4,
    head_dim=256, query_pre_attn_scalar=256,
)  # fmt: skip
OLMO3_32B: dict[str, Any] = dict(
    model_type="olmo3", num_hidden_layers=64, hidden_size=5120, intermediate_size=27648, num_attention_heads=40,
    num_key_value_heads=8, vocab_size=100278, max_position_embeddings=65536, rope_theta=5e5, sliding_window=4096,
    rope_scaling=dict(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=8192, attention_factor=1.2079441541679836,
        beta_fast=32, beta_slow=1,
    ),
)  # fmt: skip
OLMO3_7B = OLMO3_32B | dict(
    num_hidden_layers=32, hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=32
)
KIMI_K2 = dict(
    model_type="kimi_k2", num_hidden_layers=61, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
    num_attention_heads=64, num_key_value_heads=64, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=384, num_experts_per_tok=8, n_shared_experts=1, n_group=1,
    topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.827, scoring_func="sigmoid", norm_topk_prob=True,
    topk_method="noaux_tc", vocab_size=163840, max_position_embeddings=131072, rope_theta=50000.0, rms_norm_eps=1e-6,
    tie_word_embeddings=False,
)  # fmt: skip
GPT_OSS = dict(
    model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8,
    head_dim=64, num_experts_per_tok=4, sliding_window=128, vocab_size=201088, max_position_embeddings=131072,
    tie_word_embeddings=False,
)  # fmt: skip
GEMMA2_27B = dict(
    model_type="gemma2", num_hidden_layers=46, hidden_size=4608, intermediate_size=36864, num_attention_heads=32,
    num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=144, sliding_window=4096, vocab_size=256000,
    max_position_embeddings=8192,
)  # fmt: skip
PUBLISHED: dict[int, dict[str, Any]] = {
    1_026_408_209_408: KIMI_K2,
    20_914_757_184: GPT_OSS | dict(num_hidden_layers=24, num_local_experts=32),
    116_829_156_672: GPT_OSS | dict(num_hidden_layers=36, num_local_experts=128),
    27_227_128_320: GEMMA2_27B,
    3_880_263_168: GEMMA3_4B,
    27_009_346_304: GEMMA3_27B,
    7_298_011_136: OLMO3_7B,
    32_233_522_176: OLMO3_32B,
}


@pytest.mark.parametrize("count", PUBLISHED)
def test_published_models_have_their_size(count: int) -> None:
    assert count_parameters(read_model(PUBLISHED[count], "c")[1]) == count


def test_gemma_2_has_its_usual_caps_and_windows() -> None:
    model = read_model(GEMMA2_27B, "c")[1]
    assert (model.attn_logit_softcapping, model.final_logit_softcapping) == (50.0, 30.0)
    assert [i for i in range(46) if not model.has_window(i)] == list(range(1, 46, 2))
    assert not model.qk_layernorm and family_of(model).name == "gemma2"


def test_gemma_of_27_billion_as_it_was_published() -> None:
    """Its file is older than rotations by the kind of a layer."""
    model = read_model(GEMMA3_27B, "c")[1]
    assert (model.rotary_base, model.rope_scaling.rotary_seq_len_interpolation_factor) == (1e6, 8.0)
    assert (model.window_rotary_base, model.window_size, model.softmax_scale) == (1e4, 1024, 168**-0.5)
    assert [i for i in range(62) if not model.has_window(i)] == list(range(5, 62, 6))
    assert [model.for_layer(i).rotary_base for i in (4, 5)] == [1e4, 1e6]
    assert family_of(model).name == "gemma3_text"


def test_olmo_as_it_was_published() -> None:
    """YaRN is for the layers without a window."""
    model = read_model(OLMO3_7B, "c")[1]
    assert [i for i in range(32) if not model.has_window(i)] == list(range(3, 32, 4))
    assert [model.for_layer(i).rope_scaling.kind for i in (2, 3)] == [None, "yarn"]
    assert (model.window_rotary_base, model.rotary_base) == (5e5, 5e5)
    assert family_of(model).name == "olmo3"
    with pytest.raises(ConfigError, match=r"^c: rope_scaling: attention_factor '1.3' not supported \(only 1.20794,"):
        read_model(OLMO3_7B | {"rope_scaling": OLMO3_7B["rope_scaling"] | {"attention_factor": 1.3}}, "c")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (dict(attn_logit_softcapping=50.0), "--attn-logit-softcapping=50"),
        (dict(final_logit_softcapping=30.0), "--final-logit-softcapping=30"),
        (dict(softmax_type="learnable"), "--softmax-type=learnable"),
    ],
)
def test_what_a_family_has_no_place_for_is_named(changes: dict[str, Any], line: str) -> None:
    """An OLMo with soft caps or sinks would compute something else as any family that there is."""
    model = dataclasses.replace(read_model(OLMO3_7B, "c")[1], **changes)
    with pytest.raises(ConfigError, match=f"no Hugging Face family has this model; nearest is olmo3: .*{line}"):
        family_of(model)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (dict(attn_logit_softcapping=50.0), r"c: attn_logit_softcapping '50.0' not supported \(only null\)"),
        (dict(use_bidirectional_attention=True), "c: use_bidirectional_attention 'True' not supported"),
        (dict(layer_types=["full_attention"]), "c: layer_types .* is not a list of 62 of"),
    ],
)
def test_gemmas_that_are_others(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        read_model(GEMMA3_27B | changes, "c")
    with pytest.raises(ConfigError, match="no Hugging Face family has this model; .*--embedding-multiplier=3"):
        family_of(dataclasses.replace(read_model(GEMMA3_27B, "c")[1], embedding_multiplier=3.0))
