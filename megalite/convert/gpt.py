"""GPT-2, GPT-NeoX and Pythia: LayerNorm and biases everywhere.

GPT-2 has learned positions, and its Conv1D stores matrices transposed. GPT-NeoX has partial RoPE, attention and MLP
side by side; its fused projection keeps query, key and value of a head together: with one query head a group, that is
our order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.config import ModelConfig
from megalite.convert.family import GROUPED_TRANSPOSED, TRANSPOSED, HuggingFaceFamily, LayerRule
from megalite.convert.fields import Fields, name_there, read_rotary, write_rotary

ACTIVATIONS = {"gelu_new": "gelu-tanh", "gelu_fast": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "gelu": "gelu"}

GPT2_RULES = (
    LayerRule("embedding.word_embeddings", ("transformer.wte",)),
    LayerRule("embedding.position_embeddings", ("transformer.wpe",)),
    LayerRule("layers.{i}.input_norm", ("transformer.h.{i}.ln_1",)),
    LayerRule("layers.{i}.attention.qkv", ("transformer.h.{i}.attn.c_attn",), GROUPED_TRANSPOSED),
    LayerRule("layers.{i}.attention.proj", ("transformer.h.{i}.attn.c_proj",), TRANSPOSED),
    LayerRule("layers.{i}.mlp_norm", ("transformer.h.{i}.ln_2",)),
    LayerRule("layers.{i}.mlp.fc1", ("transformer.h.{i}.mlp.c_fc",), TRANSPOSED),
    LayerRule("layers.{i}.mlp.fc2", ("transformer.h.{i}.mlp.c_proj",), TRANSPOSED),
    LayerRule("head.final_norm", ("transformer.ln_f",)),
    LayerRule("head.output", ("lm_head",)),
)
NEOX_RULES = (
    LayerRule("embedding.word_embeddings", ("gpt_neox.embed_in",)),
    LayerRule("layers.{i}.input_norm", ("gpt_neox.layers.{i}.input_layernorm",)),
    LayerRule("layers.{i}.attention.qkv", ("gpt_neox.layers.{i}.attention.query_key_value",)),
    LayerRule("layers.{i}.attention.proj", ("gpt_neox.layers.{i}.attention.dense",)),
    LayerRule("layers.{i}.mlp_norm", ("gpt_neox.layers.{i}.post_attention_layernorm",)),
    LayerRule("layers.{i}.mlp.fc1", ("gpt_neox.layers.{i}.mlp.dense_h_to_4h",)),
    LayerRule("layers.{i}.mlp.fc2", ("gpt_neox.layers.{i}.mlp.dense_4h_to_h",)),
    LayerRule("head.final_norm", ("gpt_neox.final_layer_norm",)),
    LayerRule("head.output", ("embed_out",)),
)


def _read_gpt2(fields: Fields) -> ModelConfig:
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    hidden, positions = fields.integer("n_embd"), fields.integer("n_positions", 1024)
    return ModelConfig(
        model_type="gpt",
        num_layers=fields.integer("n_layer"),
        hidden_size=hidden,
        ffn_hidden_size=None if fields.get("n_inner") is None else fields.integer("n_inner"),
        num_attention_heads=fields.integer("n_head"),
        seq_length=positions,
        max_position_embeddings=positions,
        normalization="LayerNorm",
        norm_epsilon=fields.number("layer_norm_epsilon", 1e-5),
        activation=fields.choice("activation_function", ACTIVATIONS, "gelu_new"),
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings", True),
        init_method_std=fields.number("initializer_range", 0.02),
        vocab_size=fields.integer("vocab_size"),
    )


def _write_gpt2(model: ModelConfig) -> Mapping[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "n_positions": model.max_positions,
        "n_ctx": model.max_positions,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,  # null: 4 n_embd there, 4h here
        "activation_function": name_there(ACTIVATIONS, model.activation),
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "scale_attn_weights": True,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_cache": True,
    }


def _read_neox(fields: Fields) -> ModelConfig:
    fields.only("attention_bias", True)
    positions = fields.integer("max_position_embeddings", 2048)
    newer = fields.section("rope_parameters")
    stated = newer.get("partial_rotary_factor") is not None
    share = newer.number("partial_rotary_factor") if stated else fields.number("rotary_pct", 0.25)
    width = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    if share > 1:
        raise fields.wrong("rotary_pct", share, "is not a part of a head's channels (at most 1)")
    if (turned := int(width * share)) % 2 or not turned:
        raise fields.wrong("rotary_pct", share, f"turns {turned} of a head's {width} channels; only an even number is")
    return ModelConfig(
        model_type="gpt",
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=fields.integer("hidden_size"),
        ffn_hidden_size=fields.integer("intermediate_size"),
        num_attention_heads=fields.integer("num_attention_heads"),
        seq_length=positions,
        max_position_embeddings=positions,
        rotary_percent=share,
        use_parallel_residual=fields.flag("use_parallel_residual", True),
        normalization="LayerNorm",
        norm_epsilon=fields.number("layer_norm_eps", 1e-5),
        activation=fields.choice("hidden_act", ACTIVATIONS, "gelu"),
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings", False),
        init_method_std=fields.number("initializer_range", 0.02),
        vocab_size=fields.integer("vocab_size"),
        **read_rotary(fields),
    )


def _write_neox(model: ModelConfig) -> Mapping[str, Any]:
    rotary = write_rotary(model)
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "hidden_act": name_there(ACTIVATIONS, model.activation),
        "max_position_embeddings": model.max_positions,
        "layer_norm_eps": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_parallel_residual": model.use_parallel_residual,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_cache": True,
        "rotary_pct": model.rotary_percent,
        "rotary_emb_base": model.rotary_base,
        **rotary,
        "rope_parameters": {**rotary["rope_parameters"], "partial_rotary_factor": model.rotary_percent},
    }


GPT2 = HuggingFaceFamily(
    "gpt2",
    "GPT2LMHeadModel",
    "transformer.",
    GPT2_RULES,
    _read_gpt2,
    _write_gpt2,
    ignored=(".attn.bias", ".attn.masked_bias"),
)
GPT_NEOX = HuggingFaceFamily(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "gpt_neox.",
    NEOX_RULES,
    _read_neox,
    _write_neox,
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
