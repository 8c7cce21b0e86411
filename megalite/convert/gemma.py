"""Gemma 3 without images (arXiv 2503.19786): norms before and behind attention and MLP, of 1 + weight; five layers with
a window and a rotary base of their own, then one without; embeddings times sqrt(h). Gemma 2 (arXiv 2408.00118): the
same with soft caps of scores and logits, in place of norms of queries and keys; every second layer has the window.
"""

from __future__ import annotations

import math
from typing import Any

from megalite.config import ModelConfig
from megalite.convert.family import HuggingFaceFamily, LayerRule
from megalite.convert.fields import Fields, name_there, read_rotaries, write_rotaries
from megalite.convert.llama import RULES, read_layer_kinds, read_shape, windows, write_shape, write_windows

ACTIVATIONS = {"gelu_pytorch_tanh": "geglu-tanh", "gelu": "geglu", "silu": "swiglu"}
GEMMA_RULES = (
    *RULES,
    LayerRule("layers.{i}.post_attention_norm", ("model.layers.{i}.post_attention_layernorm",)),
    LayerRule("layers.{i}.mlp_norm", ("model.layers.{i}.pre_feedforward_layernorm",)),
    LayerRule("layers.{i}.post_mlp_norm", ("model.layers.{i}.post_feedforward_layernorm",)),
)
GLOBAL_BASE, WINDOW_BASE = 1e6, 1e4
FIXED = {"attention_bias": False, "use_bidirectional_attention": False}
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _read(fields: Fields) -> ModelConfig:
    if fields.get(SOFT_CAPS[0]) is not None:
        raise fields.wrong(SOFT_CAPS[0], fields.get(SOFT_CAPS[0]), "not supported (only null)")
    step = fields.integer("sliding_window_pattern", 6)
    having = read_layer_kinds(fields, lambda index: (index + 1) % step > 0)
    window_base = fields.number("rope_local_base_freq", WINDOW_BASE)
    rotaries = read_rotaries(fields, GLOBAL_BASE, window_base, having=having)
    return _model(fields, having, qk_layernorm=True, **rotaries)


def _read_2(fields: Fields) -> ModelConfig:
    usual = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    having = read_layer_kinds(fields, lambda index: index % 2 == 0)
    return _model(Fields({**usual, **fields.raw}, fields.where), having)


def _model(fields: Fields, having: list[bool], **more: Any) -> ModelConfig:
    """What Gemma 2 and 3 share. having: layers with a window."""
    fields.fixed(FIXED)
    width, scalar = fields.integer("head_dim", 256), fields.integer("query_pre_attn_scalar", 256)
    caps = {name: fields.number(name) for name in SOFT_CAPS if fields.get(name) is not None}
    return read_shape(
        fields,
        **windows(fields, having),
        **caps,
        **more,
        kv_channels=width,
        softmax_scale=None if scalar == width else scalar**-0.5,
        activation=fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        norm_placement="sandwich",
        apply_layernorm_1p=True,
        embedding_multiplier=math.sqrt(fields.integer("hidden_size")),
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings", True),
    )


def _write(model: ModelConfig) -> dict[str, Any]:
    rotaries = write_rotaries(model, WINDOW_BASE)
    local = rotaries["rope_parameters"]["sliding_attention"]["rope_theta"]
    return {**_write_2(model), **rotaries, "rope_local_base_freq": local}


def _write_2(model: ModelConfig) -> dict[str, Any]:
    shape = write_shape(model)
    del shape["hidden_act"]
    return shape | {
        "head_dim": model.head_dim,
        "hidden_activation": name_there(ACTIVATIONS, model.activation),
        "query_pre_attn_scalar": model.head_dim if model.softmax_scale is None else round(model.softmax_scale**-2),
        **write_windows(model),
        **FIXED,
        **{name: getattr(model, name) for name in SOFT_CAPS},
    }


GEMMA2 = HuggingFaceFamily("gemma2", "Gemma2ForCausalLM", GEMMA_RULES, _read_2, _write_2)
GEMMA3 = HuggingFaceFamily("gemma3_text", "Gemma3ForCausalLM", GEMMA_RULES, _read, _write)
