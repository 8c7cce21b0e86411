"""Families with norms behind attention and MLP.

Gemma 3 without images (arXiv 2503.19786): norms before and behind, of 1 + weight; five layers with a window and a
rotary base of their own, then one without; embeddings times sqrt(h). Gemma 2 (arXiv 2408.00118): the same with soft
caps of scores and logits, in place of norms of queries and keys; every second layer has the window.

OLMo 2 (arXiv 2501.00656): Llama's layers with norms behind and none before, and norms over all queries and all keys of
a token. OLMo 3 (arXiv 2512.13961): the same with a window in three of four layers; YaRN, where there is any, is for the
others.
"""

import math
from typing import Any

from megalite.config import ModelConfig
from megalite.convert.family import HuggingFaceFamily, LayerRule
from megalite.convert.fields import Fields, name_there, read_rotaries, write_rotaries
from megalite.convert.llama import LAYER_KINDS, RULES, read_shape, windows, write_shape, write_windows

ACTIVATIONS = {"gelu_pytorch_tanh": "geglu-tanh", "gelu": "geglu", "silu": "swiglu"}
RULES_BEHIND = (
    *RULES,
    LayerRule("layers.{i}.post_attention_norm", ("model.layers.{i}.post_attention_layernorm",)),
    LayerRule("layers.{i}.mlp_norm", ("model.layers.{i}.pre_feedforward_layernorm",)),
    LayerRule("layers.{i}.post_mlp_norm", ("model.layers.{i}.post_feedforward_layernorm",)),
)
GLOBAL_BASE, WINDOW_BASE = 1e6, 1e4
OLMO_BASE, OLMO_WINDOW = 5e5, 4096
FIXED = {"attention_bias": False, "use_bidirectional_attention": False}
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _read_gemma3(fields: Fields) -> ModelConfig:
    if fields.get(SOFT_CAPS[0]) is not None:
        raise fields.wrong(SOFT_CAPS[0], fields.get(SOFT_CAPS[0]), "not supported (only null)")
    step = fields.integer("sliding_window_pattern", 6)
    having = fields.of_layers("layer_types", LAYER_KINDS, lambda index: (index + 1) % step > 0)
    window_base = fields.number("rope_local_base_freq", WINDOW_BASE)
    rotaries = read_rotaries(fields, GLOBAL_BASE, window_base, having=having)
    return _gemma(fields, having, qk_layernorm=True, **rotaries)


def _read_gemma2(fields: Fields) -> ModelConfig:
    usual = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    having = fields.of_layers("layer_types", LAYER_KINDS, lambda index: index % 2 == 0)
    return _gemma(Fields({**usual, **fields.raw}, fields.where), having)


def _gemma(fields: Fields, having: list[bool], **more: Any) -> ModelConfig:
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


def _write_gemma3(model: ModelConfig) -> dict[str, Any]:
    rotaries = write_rotaries(model, WINDOW_BASE)
    local = rotaries["rope_parameters"]["sliding_attention"]["rope_theta"]
    return {**_write_gemma2(model), **rotaries, "rope_local_base_freq": local}


def _write_gemma2(model: ModelConfig) -> dict[str, Any]:
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


def _read_olmo(fields: Fields, **more: Any) -> ModelConfig:
    """What all of OLMo 2 and its successors have, and `more` of one of them. Raises ConfigError."""
    fields.only("attention_bias", False)
    norms: dict[str, Any] = dict(norm_placement="post", qk_layernorm=True, qk_layernorm_across_heads=True)
    return read_shape(fields, 1e-5, **norms, **more)


def _write_olmo(model: ModelConfig) -> dict[str, Any]:
    """The entries of config.json that they share."""
    return write_shape(model) | {"attention_bias": False}


def _read_olmo3(fields: Fields) -> ModelConfig:
    having = fields.of_layers("layer_types", LAYER_KINDS, lambda index: (index + 1) % 4 != 0)
    rotaries = read_rotaries(fields, OLMO_BASE, None, having=having)
    return _read_olmo(fields, **rotaries, **windows(fields, having, OLMO_WINDOW))


def _write_olmo3(model: ModelConfig) -> dict[str, Any]:
    return {**_write_olmo(model), **write_windows(model), **write_rotaries(model, None)}


GEMMA2 = HuggingFaceFamily("gemma2", "Gemma2ForCausalLM", RULES_BEHIND, _read_gemma2, _write_gemma2)
GEMMA3 = HuggingFaceFamily("gemma3_text", "Gemma3ForCausalLM", RULES_BEHIND, _read_gemma3, _write_gemma3)
OLMO2 = HuggingFaceFamily("olmo2", "Olmo2ForCausalLM", RULES_BEHIND, _read_olmo, _write_olmo)
OLMO3 = HuggingFaceFamily("olmo3", "Olmo3ForCausalLM", RULES_BEHIND, _read_olmo3, _write_olmo3)
