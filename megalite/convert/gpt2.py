"""GPT-2: learned positions, LayerNorm, biases everywhere; its Conv1D stores matrices transposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.config import ModelConfig
from megalite.convert.family import GROUPED_TRANSPOSED, TRANSPOSED, HuggingFaceFamily, LayerRule
from megalite.convert.fields import Fields

ACTIVATIONS = {"gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "gelu": "gelu"}

RULES = (
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


def _read(fields: Fields) -> ModelConfig:
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


def _write(model: ModelConfig) -> Mapping[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "n_positions": model.max_positions,
        "n_ctx": model.max_positions,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,  # null: 4 n_embd there, 4h here
        "activation_function": next((t for t, ours in ACTIVATIONS.items() if ours == model.activation), "gelu_new"),
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "scale_attn_weights": True,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_cache": True,
    }


GPT2 = HuggingFaceFamily(
    "gpt2", "GPT2LMHeadModel", "transformer.", RULES, _read, _write, ignored=(".attn.bias", ".attn.masked_bias")
)
