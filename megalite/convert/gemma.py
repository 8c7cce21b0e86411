"""Gemma 3 without images (arXiv 2503.19786): norms before and behind attention and MLP, of 1 + weight; five layers with
a window and a rotary base of their own, then one without; embeddings times sqrt(h).
"""

from __future__ import annotations

import math
from typing import Any

from megalite.config import ModelConfig
from megalite.convert.family import HuggingFaceFamily, LayerRule
from megalite.convert.fields import MOST_LAYERS, Fields, name_there, read_rotaries, write_rotaries
from megalite.convert.llama import (
    IGNORED,
    RULES,
    read_layer_kinds,
    read_shape,
    windows,
    write_layer_kinds,
    write_shape,
)

ACTIVATIONS = {"gelu_pytorch_tanh": "geglu-tanh", "gelu": "geglu", "silu": "swiglu"}
GEMMA_RULES = (
    *RULES,
    LayerRule("layers.{i}.post_attention_norm", ("model.layers.{i}.post_attention_layernorm",)),
    LayerRule("layers.{i}.mlp_norm", ("model.layers.{i}.pre_feedforward_layernorm",)),
    LayerRule("layers.{i}.post_mlp_norm", ("model.layers.{i}.post_feedforward_layernorm",)),
)
GLOBAL_BASE, WINDOW_BASE = 1e6, 1e4


def _read(fields: Fields) -> ModelConfig:
    fields.only("attention_bias", False)
    fields.only("use_bidirectional_attention", False)
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if fields.get(name) is not None:
            raise fields.wrong(name, fields.get(name), "not supported (only null)")
    layers, width = fields.integer("num_hidden_layers"), fields.integer("head_dim", 256)
    step, scalar = fields.integer("sliding_window_pattern", 6), fields.integer("query_pre_attn_scalar", 256)
    usual = [(index + 1) % step > 0 for index in range(min(layers, MOST_LAYERS))]
    having = read_layer_kinds(fields, layers) or usual
    window_base = fields.number("rope_local_base_freq", WINDOW_BASE)
    return read_shape(
        fields,
        **read_rotaries(fields, GLOBAL_BASE, window_base, windowed=any(having)),
        **windows(fields, having),
        kv_channels=width,
        softmax_scale=None if scalar == width else scalar**-0.5,
        activation=fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        norm_placement="sandwich",
        apply_layernorm_1p=True,
        qk_layernorm=True,
        embedding_multiplier=math.sqrt(fields.integer("hidden_size")),
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings", True),
    )


def _write(model: ModelConfig) -> dict[str, Any]:
    shape = write_shape(model)
    del shape["hidden_act"]
    rotaries = write_rotaries(model, WINDOW_BASE)
    return shape | {
        "head_dim": model.head_dim,
        "hidden_activation": name_there(ACTIVATIONS, model.activation),
        "query_pre_attn_scalar": model.head_dim if model.softmax_scale is None else round(model.softmax_scale**-2),
        "sliding_window": model.window_size or model.max_positions,
        "layer_types": write_layer_kinds(model),
        "attention_bias": False,
        "use_bidirectional_attention": False,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        **rotaries,
        "rope_local_base_freq": rotaries["rope_parameters"]["sliding_attention"]["rope_theta"],
    }


GEMMA3 = HuggingFaceFamily("gemma3_text", "Gemma3ForCausalLM", "model.", GEMMA_RULES, _read, _write, IGNORED)
