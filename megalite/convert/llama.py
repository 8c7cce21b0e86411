"""Llama 2/3, Mistral, Qwen2, Qwen3, and with experts Mixtral, Qwen3-MoE, OLMoE: one block and its variations.

RoPE is half-rotated on both sides, so no row of q or k moves. Each expert is apart there, all are stacked here. The
loss that balances experts, of L layers with experts, k of E experts for a token, f_le the choices of expert e in layer
l over the tokens (they sum up to k) and P_le its mean probability:

    there   c E sum_e (mean_l f_le) (mean_l P_le)          c: router_aux_loss_coef
    here    a E/k sum_l sum_e f_le P_le                    a: moe_aux_loss_coeff = c k/L

With one such layer they are the same, and with layers of the same loads their gradients are. Else there the mean over
layers is balanced, and here each layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megalite.config import Experts, ModelConfig, pattern_text
from megalite.convert.family import GROUPED, STACKED, HuggingFaceFamily, LayerRule, TensorForm
from megalite.convert.fields import MOST_LAYERS, Fields, name_there, read_rotary, write_rotary

ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu"}

RULES = (
    LayerRule("embedding.word_embeddings", ("model.embed_tokens",)),
    LayerRule("layers.{i}.input_norm", ("model.layers.{i}.input_layernorm",)),
    LayerRule(
        "layers.{i}.attention.qkv",
        (
            "model.layers.{i}.self_attn.q_proj",
            "model.layers.{i}.self_attn.k_proj",
            "model.layers.{i}.self_attn.v_proj",
        ),
        GROUPED,
    ),
    LayerRule("layers.{i}.attention.q_norm", ("model.layers.{i}.self_attn.q_norm",)),
    LayerRule("layers.{i}.attention.k_norm", ("model.layers.{i}.self_attn.k_norm",)),
    LayerRule("layers.{i}.attention.proj", ("model.layers.{i}.self_attn.o_proj",)),
    LayerRule("layers.{i}.mlp_norm", ("model.layers.{i}.post_attention_layernorm",)),
    LayerRule("layers.{i}.mlp.fc1", ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"), STACKED),
    LayerRule("layers.{i}.mlp.fc2", ("model.layers.{i}.mlp.down_proj",)),
    LayerRule("head.final_norm", ("model.norm",)),
    LayerRule("head.output", ("lm_head",)),
)
IGNORED = (".rotary_emb.inv_freq",)
# Gate and value of every expert: 2E tensors there, `[E, 2, f, h]` here.
STACKED_PAIRS = TensorForm(
    lambda model, t: list(t.flatten(0, 1).unbind()),
    lambda model, parts: torch.stack(list(parts)).unflatten(0, (-1, 2)),
)
# E tensors there, `[E, ...]` here.
STACKED_ALL = TensorForm(lambda model, t: list(t.unbind()), lambda model, parts: torch.stack(list(parts)))
MOST_EXPERTS = 4096
MIXTRAL_BLOCK, QWEN_BLOCK = "model.layers.{i}.block_sparse_moe.", "model.layers.{i}.mlp."
ROUTER, FC1, FC2 = "layers.{i}.mlp.router", "layers.{i}.mlp.experts.fc1", "layers.{i}.mlp.experts.fc2"
MIXTRAL_RULES = (
    *RULES,
    LayerRule(ROUTER, (MIXTRAL_BLOCK + "gate",)),
    LayerRule(FC1, (MIXTRAL_BLOCK + "experts.{e}.w1", MIXTRAL_BLOCK + "experts.{e}.w3"), STACKED_PAIRS),
    LayerRule(FC2, (MIXTRAL_BLOCK + "experts.{e}.w2",), STACKED_ALL),
)
QWEN_RULES = (
    *RULES,
    LayerRule(ROUTER, (QWEN_BLOCK + "gate",)),
    LayerRule(FC1, (QWEN_BLOCK + "experts.{e}.gate_proj", QWEN_BLOCK + "experts.{e}.up_proj"), STACKED_PAIRS),
    LayerRule(FC2, (QWEN_BLOCK + "experts.{e}.down_proj",), STACKED_ALL),
)
COEFFICIENT = "router_aux_loss_coef"


def read_shape(fields: Fields, **more: Any) -> ModelConfig:
    """The settings that all these families share, and `more` of one family. Raises ConfigError."""
    fields.only("pretraining_tp", 1)
    fields.only("partial_rotary_factor", 1, 1.0)
    heads, positions = fields.integer("num_attention_heads"), fields.integer("max_position_embeddings")
    hidden = fields.integer("hidden_size")
    absent = fields.get("head_dim") is None and hidden % heads == 0
    values: dict[str, Any] = dict(
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=fields.integer("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=fields.integer("num_key_value_heads", heads),
        kv_channels=None if absent else fields.integer("head_dim", max(1, hidden // heads)),
        seq_length=positions,
        max_position_embeddings=positions,
        normalization="RMSNorm",
        norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
        add_bias_linear=False,
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings", False),
        init_method_std=fields.number("initializer_range", 0.02),
        vocab_size=fields.integer("vocab_size"),
        **read_rotary(fields),
    )
    return ModelConfig(model_type="llama", **(values | more))


def write_shape(model: ModelConfig) -> dict[str, Any]:
    """The entries of config.json that all these families share."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        **({} if model.kv_channels is None else {"head_dim": model.kv_channels}),
        "hidden_act": name_there(ACTIVATIONS, model.activation),
        "max_position_embeddings": model.max_positions,
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "attention_dropout": 0.0,
        "use_cache": True,
        **write_rotary(model),
    }


def _read_llama(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    if fields.flag("mlp_bias", False) != bias:
        raise fields.wrong("attention_bias", bias, "not supported with another mlp_bias")
    return read_shape(fields, add_bias_linear=bias)


def _write_llama(model: ModelConfig) -> Mapping[str, Any]:
    bias = model.add_bias_linear
    return write_shape(model) | {"attention_bias": bias, "mlp_bias": bias, "pretraining_tp": 1}


def read_window(fields: Fields) -> int | None:
    """Mistral's, of all layers."""
    return fields.integer("sliding_window") if fields.get("sliding_window") is not None else None


def _read_mistral(fields: Fields) -> ModelConfig:
    return read_shape(fields, window_size=read_window(fields))


def _write_mistral(model: ModelConfig) -> Mapping[str, Any]:
    return write_shape(model) | {"sliding_window": model.window_size}


LAYER_KINDS = {"full_attention": False, "sliding_attention": True}


def read_layer_kinds(fields: Fields, layers: int) -> list[bool] | None:
    """Which layers have the window, as `layer_types` says; None where it is absent. Raises ConfigError."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in LAYER_KINDS for kind in kinds):
        raise fields.wrong("layer_types", kinds, f"is not a list of {layers} of {', '.join(LAYER_KINDS)}")
    return [LAYER_KINDS[kind] for kind in kinds]


def write_layer_kinds(model: ModelConfig) -> list[str]:
    """`layer_types`."""
    full, sliding = LAYER_KINDS
    return [sliding if model.has_window(index) else full for index in range(model.num_layers)]


def windows(fields: Fields, having: Sequence[bool], usual: int | None = None) -> dict[str, Any]:
    """The window (`usual` where the file has none), and which layers have it."""
    if not any(having):
        return {}
    pattern = None if all(having) else pattern_text(having)
    return {"window_size": fields.integer("sliding_window", usual), "window_attn_skip_freq": pattern}


def _read_qwen_window(fields: Fields) -> dict[str, Any]:
    """The first `max_window_layers` layers have none; `layer_types`, where it is there, says it of each."""
    layers, kinds = fields.integer("num_hidden_layers"), fields.get("layer_types")
    if not fields.flag("use_sliding_window", False):
        if isinstance(kinds, list) and set(map(str, kinds)) != {"full_attention"}:
            raise fields.wrong("layer_types", kinds, "not supported without use_sliding_window")
        return {}
    first = fields.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise fields.wrong("max_window_layers", first, "is not a number of layers")
    behind = [index >= first for index in range(min(layers, MOST_LAYERS))]
    return windows(fields, read_layer_kinds(fields, layers) or behind)


def _write_qwen(model: ModelConfig) -> dict[str, Any]:
    having = [model.has_window(index) for index in range(model.num_layers)]
    first = having.index(True) if any(having) else model.num_layers
    return write_shape(model) | {
        "use_sliding_window": any(having),
        "sliding_window": model.window_size,
        "max_window_layers": first,
        "layer_types": write_layer_kinds(model),
    }


def write_qwen3(model: ModelConfig) -> dict[str, Any]:
    """The entries of Qwen3, whose blocks Qwen3-MoE has."""
    # there an absent head_dim is 128
    return _write_qwen(model) | {"head_dim": model.head_dim, "attention_bias": False}


def _read_qwen2(fields: Fields) -> ModelConfig:
    return read_shape(fields, add_qkv_bias=True, **_read_qwen_window(fields))


def read_qwen3(fields: Fields) -> ModelConfig:
    """Qwen3, or what Qwen3-MoE has of it. Raises ConfigError."""
    fields.only("attention_bias", False)
    return read_shape(
        fields,
        qk_layernorm=True,
        kv_channels=fields.integer("head_dim", 128),
        **_read_qwen_window(fields),
    )


def read_balance(fields: Fields, layers: int, default: float) -> float:
    """Our coefficient of the balancing loss. layers: how many have experts; default: the family's."""
    theirs = fields.number(COEFFICIENT, default) if fields.get(COEFFICIENT, default) != 0 else 0.0
    return _carried(theirs * fields.integer("num_experts_per_tok"), layers)


def write_balance(model: ModelConfig) -> dict[str, Any]:
    given = model.experts
    return {COEFFICIENT: _carried(given.moe_aux_loss_coeff * sum(model.sparse_layers), given.moe_router_topk)}


def _carried(coefficient: float, divisor: int) -> float:
    """The quotient, short of the digits that would keep it from coming back as it was."""
    return float(f"{coefficient / divisor:.14g}")


def read_experts(fields: Fields, number: str | None = None) -> dict[str, Any]:
    """How many experts, and how many of them for a token. number: the key of the former; None: either of two."""
    number = number or ("num_experts" if "num_experts" in fields.raw else "num_local_experts")
    experts = fields.integer(number)
    if not 2 <= experts <= MOST_EXPERTS:
        raise fields.wrong(number, experts, f"not supported (2 to {MOST_EXPERTS})")
    k = fields.integer("num_experts_per_tok")
    if k > experts:
        raise fields.wrong("num_experts_per_tok", k, f"is more than {number}")
    return {"num_experts": experts, "moe_router_topk": k}


def _read_mixtral(fields: Fields) -> ModelConfig:
    fields.only("router_jitter_noise", 0, 0.0)
    coefficient = read_balance(fields, fields.integer("num_hidden_layers"), 0.001)
    experts = Experts(**read_experts(fields, "num_local_experts"), moe_aux_loss_coeff=coefficient)
    return read_shape(fields, window_size=read_window(fields), experts=experts)


def _write_mixtral(model: ModelConfig) -> Mapping[str, Any]:
    return write_shape(model) | {
        "intermediate_size": model.expert_ffn_size,
        "num_local_experts": model.experts.num_experts,
        "num_experts_per_tok": model.experts.moe_router_topk,
        "sliding_window": model.window_size,
        **write_balance(model),
    }


def read_qwen3_moe(fields: Fields) -> ModelConfig:
    model = read_qwen3(fields)
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.wrong("mlp_only_layers", dense, "is not a list of layers")
    layers = [(index + 1) % step == 0 and index not in dense for index in range(min(model.num_layers, MOST_LAYERS))]
    if not any(layers):
        raise fields.wrong("mlp_only_layers", dense, "leaves no layer with experts")
    experts = Experts(
        **read_experts(fields),
        moe_ffn_hidden_size=fields.integer("moe_intermediate_size"),
        moe_router_pre_softmax=not fields.flag("norm_topk_prob", False),
        moe_layer_freq=pattern_text(layers),
        moe_aux_loss_coeff=read_balance(fields, sum(layers), 0.001),
    )
    return dataclasses.replace(model, experts=experts)


def write_qwen3_moe(model: ModelConfig) -> Mapping[str, Any]:
    given = model.experts
    return write_qwen3(model) | {
        "num_experts": given.num_experts,
        "num_experts_per_tok": given.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn_size,
        "norm_topk_prob": not given.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, sparse in enumerate(model.sparse_layers) if not sparse],
        **write_balance(model),
    }


def _read_olmoe(fields: Fields) -> ModelConfig:
    fields.only("attention_bias", False)
    fields.only("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    if fields.get("clip_qkv") is not None:
        raise fields.wrong("clip_qkv", fields.get("clip_qkv"), "not supported (only null)")
    experts = Experts(
        **read_experts(fields),
        moe_router_pre_softmax=not fields.flag("norm_topk_prob", False),
        moe_aux_loss_coeff=read_balance(fields, fields.integer("num_hidden_layers"), 0.01),
    )
    raw = dict(fields.raw) | {"rms_norm_eps": fields.number("rms_norm_eps", 1e-5)}  # 1e-6 elsewhere
    return read_shape(Fields(raw, fields.where), qk_layernorm=True, qk_layernorm_across_heads=True, experts=experts)


def _write_olmoe(model: ModelConfig) -> Mapping[str, Any]:
    return write_shape(model) | {
        "intermediate_size": model.expert_ffn_size,
        "num_experts": model.experts.num_experts,
        "num_experts_per_tok": model.experts.moe_router_topk,
        "norm_topk_prob": not model.experts.moe_router_pre_softmax,
        "attention_bias": False,
        "clip_qkv": None,
        **write_balance(model),
    }


LLAMA = HuggingFaceFamily("llama", "LlamaForCausalLM", "model.", RULES, _read_llama, _write_llama, IGNORED)
MISTRAL = HuggingFaceFamily("mistral", "MistralForCausalLM", "model.", RULES, _read_mistral, _write_mistral, IGNORED)
QWEN2 = HuggingFaceFamily("qwen2", "Qwen2ForCausalLM", "model.", RULES, _read_qwen2, _write_qwen, IGNORED)
QWEN3 = HuggingFaceFamily("qwen3", "Qwen3ForCausalLM", "model.", RULES, read_qwen3, write_qwen3, IGNORED)
MIXTRAL = HuggingFaceFamily(
    "mixtral", "MixtralForCausalLM", "model.", MIXTRAL_RULES, _read_mixtral, _write_mixtral, IGNORED
)
QWEN3_MOE = HuggingFaceFamily(
    "qwen3_moe", "Qwen3MoeForCausalLM", "model.", QWEN_RULES, read_qwen3_moe, write_qwen3_moe, IGNORED
)
OLMOE = HuggingFaceFamily("olmoe", "OlmoeForCausalLM", "model.", QWEN_RULES, _read_olmoe, _write_olmoe, IGNORED)
