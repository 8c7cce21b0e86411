"""Tiny models of every family: transformers' class and its settings."""

from __future__ import annotations

from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

V, S = 50, 24
WIDTH = dict(vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=S)
GATED = WIDTH | dict(intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=False)
NO_PAD: dict[str, Any] = dict(pad_token_id=None)  # there its row of the embedding has no gradient
GPT2 = dict(vocab_size=V, n_positions=S, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
QWEN3_MOE = dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def rope(values: dict[str, Any]) -> dict[str, Any]:
    """As the installed transformers spells it: in one place since version 5, before that in two."""
    if int(transformers.__version__.split(".")[0]) >= 5:
        return {"rope_parameters": values}
    scaling = {name: value for name, value in values.items() if name != "rope_theta"}
    return {"rope_scaling": scaling, "rope_theta": values["rope_theta"]}


GEMMA3 = dict(
    NO_PAD, head_dim=16, query_pre_attn_scalar=16, sliding_window=5, tie_word_embeddings=True,
    layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip


def ropes(scaling: dict[str, Any], window_base: float, kind: str = "linear") -> dict[str, Any]:
    """Rotations by the kind of a layer, as the installed transformers spells them."""
    if int(transformers.__version__.split(".")[0]) < 5:
        scaling = {"rope_type": kind, **scaling}
        return {"rope_theta": 700.0, "rope_local_base_freq": window_base, "rope_scaling": scaling}
    full = {"rope_type": kind, "rope_theta": 700.0, **scaling}
    sliding = {"rope_type": "default", "rope_theta": window_base}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


OSS_ROPE = dict(rope_type="yarn", rope_theta=150.0, factor=4.0, original_max_position_embeddings=8, truncate=False)
GPT_OSS = dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, **rope(OSS_ROPE))
SIGMOIDS = dict(
    NO_PAD, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1, n_group=4,
    topk_group=1, num_nextn_predict_layers=0,
)  # fmt: skip
LATENT = GATED | SIGMOIDS | dict(
    num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=6, v_head_dim=10,
    num_hidden_layers=3,
)  # fmt: skip
DEEPSEEK_ROPE = {
    "rope_type": "yarn", "rope_theta": 20.0, "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7,
    "mscale_all_dim": 1.5, "beta_fast": 3.0, "beta_slow": 0.2,
}  # fmt: skip
NEXT = GATED | QWEN3_MOE | NO_PAD | dict(
    linear_key_head_dim=4, linear_value_head_dim=6, linear_num_key_heads=2, linear_num_value_heads=4,
    shared_expert_intermediate_size=20, partial_rotary_factor=0.5,
)  # fmt: skip
NEXT_MOE = {name: value for name, value in NEXT.items() if name not in ("norm_topk_prob", "intermediate_size")}
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
NEXT_DENSE = {name: value for name, value in NEXT_MOE.items() if name not in EXPERTS} | dict(intermediate_size=48)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-exact-gelu-wide": ("GPT2", GPT2 | dict(activation_function="gelu", n_inner=80, layer_norm_epsilon=1e-3)),
    "gpt2-untied": ("GPT2", GPT2 | dict(tie_word_embeddings=False)),
    "llama": ("Llama", GATED),
    "llama-tied": ("Llama", GATED | dict(tie_word_embeddings=True)),
    "llama-biases": ("Llama", GATED | dict(attention_bias=True, mlp_bias=True)),
    "llama3-rope": ("Llama", GATED | rope(LLAMA3_ROPE)),
    "llama3-rope-of-another-length": (
        "Llama",
        GATED | rope(LLAMA3_ROPE | {"rope_theta": 20.0, "original_max_position_embeddings": 16}),
    ),
    "llama-yarn": ("Llama", GATED | rope(YARN_ROPE)),
    "llama-yarn-blended": (
        "Llama",
        GATED | rope(YARN_ROPE | {"rope_theta": 2.0, "original_max_position_embeddings": 96}),
    ),
    "llama-yarn-of-another-range": (
        "Llama",
        GATED
        | rope(
            YARN_ROPE | dict(rope_theta=5.0, beta_fast=1.7, beta_slow=0.3, truncate=False, mscale=1, mscale_all_dim=2)
        ),
    ),
    "llama-linear-rope": ("Llama", GATED | rope(LINEAR_ROPE)),
    "mistral-window": ("Mistral", GATED | dict(sliding_window=5, head_dim=16)),
    "mistral": ("Mistral", GATED | dict(sliding_window=None)),
    "qwen2": ("Qwen2", GATED | dict(rms_norm_eps=1e-5)),
    "qwen2-window": ("Qwen2", GATED | dict(use_sliding_window=True, sliding_window=6, max_window_layers=0)),
    "qwen2-window-behind": ("Qwen2", GATED | dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3-layer-types": (
        "Qwen3",
        GATED
        | dict(
            head_dim=16,
            use_sliding_window=True,
            sliding_window=3,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "qwen3": ("Qwen3", GATED | dict(head_dim=16, tie_word_embeddings=True)),
    "mixtral": ("Mixtral", GATED | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "mixtral-window": ("Mixtral", GATED | dict(num_local_experts=3, num_experts_per_tok=1, sliding_window=6)),
    "qwen3-moe": ("Qwen3Moe", GATED | QWEN3_MOE),
    "qwen3-moe-mixed": ("Qwen3Moe", GATED | QWEN3_MOE | dict(norm_topk_prob=False, mlp_only_layers=[0])),
    "olmoe": ("Olmoe", GATED | NO_PAD | dict(num_experts=4, num_experts_per_tok=2)),
    "olmoe-normalised": ("Olmoe", GATED | NO_PAD | dict(num_experts=3, num_experts_per_tok=2, norm_topk_prob=True)),
    "olmo2": ("Olmo2", GATED | NO_PAD),
    "olmo2-of-wide-heads": ("Olmo2", GATED | NO_PAD | dict(head_dim=16, rms_norm_eps=1e-3)),
    "olmo3": ("Olmo3", GATED | NO_PAD | dict(num_hidden_layers=5, sliding_window=5, **ropes({}, 700.0, "default"))),
    "olmo3-yarn": ("Olmo3", GATED | NO_PAD | dict(num_hidden_layers=4, sliding_window=5, **ropes(YARN, 700.0, "yarn"))),
    "olmo3-other-yarn": (
        "Olmo3",
        GATED
        | NO_PAD
        | dict(
            sliding_window=5,
            layer_types=["full_attention", "sliding_attention"],
            **ropes(YARN | dict(beta_fast=3.0, beta_slow=0.2, mscale=0.7, mscale_all_dim=1.5), 20.0, "yarn"),
        ),
    ),
    "gemma3": ("Gemma3", GATED | GEMMA3),
    "gemma3-scaled": (
        "Gemma3",
        GATED | GEMMA3 | dict(query_pre_attn_scalar=5, tie_word_embeddings=False, **ropes({"factor": 8.0}, 300.0)),
    ),
    "gemma3-windows-alone": ("Gemma3", GATED | GEMMA3 | dict(layer_types=["sliding_attention"] * 2)),
    "gemma3-usual": ("Gemma3", GATED | GEMMA3 | dict(layer_types=None, num_hidden_layers=7)),
    "gpt-oss": ("GptOss", GATED | GPT_OSS),
    "gpt-oss-clamped": (
        "GptOss",
        GATED
        | GPT_OSS
        | dict(layer_types=["full_attention", "sliding_attention"], swiglu_limit=0.05, num_experts_per_tok=1)
        | rope(dict(OSS_ROPE, beta_fast=3.0, beta_slow=0.2)),
    ),
    "deepseek": ("DeepseekV3", LATENT | rope(DEEPSEEK_ROPE)),
    "deepseek-wide-values": ("DeepseekV3", LATENT | dict(q_lora_rank=None, v_head_dim=20, n_group=1, topk_group=1)),
    "glm-lite": ("Glm4MoeLite", LATENT | dict(n_group=1, topk_group=1, routed_scaling_factor=1.0)),
    "glm": (
        "Glm4Moe",
        GATED
        | SIGMOIDS
        | dict(attention_bias=True, use_qk_norm=True, head_dim=16, num_hidden_layers=3, n_group=1, topk_group=1),
    ),
    "qwen3-next": ("Qwen3Next", NEXT | dict(num_hidden_layers=4)),
    "qwen3-next-other": (
        "Qwen3Next",
        NEXT | dict(layer_types=["full_attention", "linear_attention"], mlp_only_layers=[0], norm_topk_prob=False),
    ),
    "gemma2": ("Gemma2", GATED | GEMMA3 | dict(attn_logit_softcapping=2.0, final_logit_softcapping=0.7)),
    "gemma3-capped": ("Gemma3", GATED | GEMMA3 | dict(final_logit_softcapping=0.7)),
    "qwen3.5": ("Qwen3_5", NEXT_DENSE | dict(num_hidden_layers=4)),
    "qwen3.5-tied": (
        "Qwen3_5",
        NEXT_DENSE | dict(layer_types=["linear_attention", "full_attention"], tie_word_embeddings=True),
    ),
    "qwen3.5-moe": ("Qwen3_5Moe", NEXT_MOE | dict(num_hidden_layers=4)),
    "neox": ("GPTNeoX", WIDTH | dict(intermediate_size=64)),
    "neox-serial": ("GPTNeoX", WIDTH | dict(intermediate_size=64, use_parallel_residual=False)),
}
