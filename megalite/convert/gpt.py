"""GPT-2, GPT-NeoX and Pythia: LayerNorm and biases everywhere.

GPT-2 has learned positions, and its Conv1D stores matrices transposed. GPT-NeoX has partial RoPE, attention and MLP
side by side; its fused projection keeps query, key and value of a head together: with one query head a group, that is
our order.
"""

from collections.abc import Mapping
from typing import Any

from megalite.config import ModelConfig
from megalite.convert.family import GROUPED_TRANSPOSED, TRANSPOSED, HuggingFaceFamily, Renamed
from megalite.convert.fields import Fields, name_there, read_common, read_rotary_share, write_common

ACTIVATIONS = {"gelu_new": "gelu-tanh", "gelu_fast": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "gelu": "gelu"}

GPT2_BLOCK, NEOX_BLOCK = "transformer.h.{i}.", "gpt_neox.layers.{i}."
GPT2_RULES = (
    *Renamed({"word_embeddings": "wte", "position_embeddings": "wpe"}, "transformer.", ours="embedding."),
    *Renamed({"input_norm": "ln_1", "mlp_norm": "ln_2"}, GPT2_BLOCK),
    *Renamed({"attention.qkv": "attn.c_attn"}, GPT2_BLOCK, GROUPED_TRANSPOSED),
    *Renamed({"attention.proj": "attn.c_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}, GPT2_BLOCK, TRANSPOSED),
    *Renamed({"head.final_norm": "transformer.ln_f", "head.output": "lm_head"}, "", ours=""),
)
NEOX_RULES = (
    *Renamed({"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}, NEOX_BLOCK),
    *Renamed({"attention.qkv": "attention.query_key_value", "attention.proj": "attention.dense"}, NEOX_BLOCK),
    *Renamed({"mlp.fc1": "mlp.dense_h_to_4h", "mlp.fc2": "mlp.dense_4h_to_h"}, NEOX_BLOCK),
    *Renamed({"embedding.word_embeddings": "gpt_neox.embed_in"}, "", ours=""),
    *Renamed({"head.final_norm": "gpt_neox.final_layer_norm", "head.output": "embed_out"}, "", ours=""),
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
    share = read_rotary_share(fields, 0.25, "rotary_pct")
    width = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    if share > 1:
        raise fields.wrong("rotary_pct", share, "is not a part of a head's channels (at most 1)")
    if (turned := int(width * share)) % 2 or not turned:
        raise fields.wrong("rotary_pct", share, f"turns {turned} of a head's {width} channels; only an even number is")
    return ModelConfig(
        model_type="gpt",
        rotary_percent=share,
        use_parallel_residual=fields.flag("use_parallel_residual", True),
        normalization="LayerNorm",
        norm_epsilon=fields.number("layer_norm_eps", 1e-5),
        **read_common(fields, ACTIVATIONS, "gelu", 2048),
    )


def _write_neox(model: ModelConfig) -> Mapping[str, Any]:
    shape = write_common(model, ACTIVATIONS)
    return shape | {
        "layer_norm_eps": model.norm_epsilon,
        "attention_bias": True,
        "hidden_dropout": 0.0,
        "use_parallel_residual": model.use_parallel_residual,
        "rotary_pct": model.rotary_percent,
        "rotary_emb_base": model.rotary_base,
        "rope_parameters": {**shape["rope_parameters"], "partial_rotary_factor": model.rotary_percent},
    }


GPT2 = HuggingFaceFamily(
    "gpt2", "GPT2LMHeadModel", GPT2_RULES, _read_gpt2, _write_gpt2, prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)  # fmt: skip
GPT_NEOX = HuggingFaceFamily(
    "gpt_neox", "GPTNeoXForCausalLM", NEOX_RULES, _read_neox, _write_neox, prefix="gpt_neox.",
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)  # fmt: skip
