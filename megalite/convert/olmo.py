"""OLMo 2 (arXiv 2501.00656): Llama's layers, with norms of what attention and MLP return and none of what they read,
and norms over all queries and all keys of a token. OLMo 3 (arXiv 2512.13961): the same with a window in three of four
layers; YaRN, where there is any, is for the others.
"""

from __future__ import annotations

from typing import Any

from megalite.config import ModelConfig
from megalite.convert.family import HuggingFaceFamily, LayerRule
from megalite.convert.fields import Fields, read_rotaries, write_rotaries
from megalite.convert.llama import RULES, read_layer_kinds, read_shape, windows, write_shape, write_windows

OLMO_RULES = (
    *RULES,
    LayerRule("layers.{i}.post_attention_norm", ("model.layers.{i}.post_attention_layernorm",)),
    LayerRule("layers.{i}.post_mlp_norm", ("model.layers.{i}.post_feedforward_layernorm",)),
)


USUAL_BASE, USUAL_WINDOW = 5e5, 4096


def read_olmo(fields: Fields, **more: Any) -> ModelConfig:
    """What all of OLMo 2 and its successors have, and `more` of one of them. Raises ConfigError."""
    fields.only("attention_bias", False)
    norms: dict[str, Any] = dict(norm_placement="post", qk_layernorm=True, qk_layernorm_across_heads=True)
    return read_shape(fields, 1e-5, **norms, **more)


def write_olmo(model: ModelConfig) -> dict[str, Any]:
    """The entries of config.json that they share."""
    return write_shape(model) | {"attention_bias": False}


def _read_olmo3(fields: Fields) -> ModelConfig:
    having = read_layer_kinds(fields, lambda index: (index + 1) % 4 != 0)
    rotaries = read_rotaries(fields, USUAL_BASE, None, having=having)
    return read_olmo(fields, **rotaries, **windows(fields, having, USUAL_WINDOW))


def _write_olmo3(model: ModelConfig) -> dict[str, Any]:
    return {**write_olmo(model), **write_windows(model), **write_rotaries(model, None)}


OLMO2 = HuggingFaceFamily("olmo2", "Olmo2ForCausalLM", OLMO_RULES, read_olmo, write_olmo)
OLMO3 = HuggingFaceFamily("olmo3", "Olmo3ForCausalLM", OLMO_RULES, _read_olmo3, _write_olmo3)
