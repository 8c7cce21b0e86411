"""gpt-oss (arXiv 2508.10925): experts and attention sinks in every block, a window in every second; biases everywhere.

All experts of a block are one tensor there, whose columns alternate gate and value: `[E, h, 2f]`, and `[E, f, h]` on
the way down. What is published has them in MXFP4 (`quantized.py`); transformers writes them in 16 bits.
"""

from __future__ import annotations

from typing import Any

from megalite.config import Experts, ModelConfig
from megalite.convert.family import HuggingFaceFamily, LayerRule, TensorForm
from megalite.convert.fields import Fields
from megalite.convert.llama import (
    FC1,
    FC2,
    QWEN_BLOCK,
    ROUTER,
    RULES,
    read_balance,
    read_experts,
    read_layer_kinds,
    read_shape,
    windows,
    write_experts,
    write_shape,
    write_windows,
)

EXPERTS = QWEN_BLOCK + "experts."
# `[E, 2, f, h]` here
ALTERNATING = TensorForm(
    lambda model, t: [t.permute(0, 3, 2, 1).flatten(2)],
    lambda model, parts: parts[0].unflatten(2, (-1, 2)).permute(0, 3, 2, 1),
)
ALTERNATING_BIAS = TensorForm(
    lambda model, t: [t.transpose(1, 2).flatten(1)], lambda model, parts: parts[0].unflatten(1, (-1, 2)).transpose(1, 2)
)
TURNED = TensorForm(lambda model, t: [t.transpose(1, 2)], lambda model, parts: parts[0].transpose(1, 2))
GPT_OSS_RULES = (
    *RULES,
    LayerRule("layers.{i}.attention.softmax_offset", ("model.layers.{i}.self_attn.sinks",)),
    LayerRule(ROUTER, (QWEN_BLOCK + "router",)),
    LayerRule(FC1 + ".weight", (EXPERTS + "gate_up_proj",), ALTERNATING),
    LayerRule(FC1 + ".bias", (EXPERTS + "gate_up_proj_bias",), ALTERNATING_BIAS),
    LayerRule(FC2 + ".weight", (EXPERTS + "down_proj",), TURNED),
    LayerRule(FC2 + ".bias", (EXPERTS + "down_proj_bias",)),
)
FIXED = {"attention_bias": True, "swiglu_alpha": 1.702, "hidden_act": "silu"}


def _read(fields: Fields) -> ModelConfig:
    fields.fixed(FIXED)
    having = read_layer_kinds(fields, lambda index: index % 2 == 0)
    experts = Experts(
        **read_experts(fields, "num_local_experts"),
        moe_router_bias=True,
        moe_aux_loss_coeff=read_balance(fields, len(having), 0.001),
    )
    return read_shape(
        fields,
        1e-5,
        **windows(fields, having, 128),
        kv_channels=fields.integer("head_dim", 64),
        add_bias_linear=True,
        softmax_type="learnable",
        activation="quick-geglu",
        glu_linear_offset=1.0,
        activation_func_clamp_value=fields.number("swiglu_limit", 7.0),
        experts=experts,
    )


def _write(model: ModelConfig) -> dict[str, Any]:
    return write_shape(model) | {
        "intermediate_size": model.expert_ffn_size,
        "head_dim": model.head_dim,
        **FIXED,
        "swiglu_limit": model.activation_func_clamp_value or 7.0,
        **write_windows(model),
        **write_experts(model, "num_local_experts"),
    }


GPT_OSS = HuggingFaceFamily("gpt_oss", "GptOssForCausalLM", GPT_OSS_RULES, _read, _write)
