"""OLMo 2 (arXiv 2501.00656): Llama's layers, with norms of what attention and MLP return and none of what they read,
and norms over all queries and all keys of a token.
"""

from __future__ import annotations

from typing import Any

from megalite.config import ModelConfig
from megalite.convert.family import HuggingFaceFamily, LayerRule
from megalite.convert.fields import Fields
from megalite.convert.llama import IGNORED, RULES, read_shape, write_shape

OLMO_RULES = (
    *RULES,
    LayerRule("layers.{i}.post_attention_norm", ("model.layers.{i}.post_attention_layernorm",)),
    LayerRule("layers.{i}.post_mlp_norm", ("model.layers.{i}.post_feedforward_layernorm",)),
)


def read_olmo(fields: Fields, **more: Any) -> ModelConfig:
    """What all of OLMo 2 and its successors have, and `more` of one of them. Raises ConfigError."""
    fields.only("attention_bias", False)
    raw = dict(fields.raw) | {"rms_norm_eps": fields.number("rms_norm_eps", 1e-5)}  # 1e-6 elsewhere
    norms: dict[str, Any] = dict(norm_placement="post", qk_layernorm=True, qk_layernorm_across_heads=True)
    return read_shape(Fields(raw, fields.where), **norms, **more)


def write_olmo(model: ModelConfig) -> dict[str, Any]:
    """The entries of config.json that they share."""
    return write_shape(model) | {"attention_bias": False}


OLMO2 = HuggingFaceFamily("olmo2", "Olmo2ForCausalLM", "model.", OLMO_RULES, read_olmo, write_olmo, IGNORED)
