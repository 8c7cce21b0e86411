"""Llama 2/3, Mistral, Qwen2, Qwen3, and with experts Mixtral, Qwen3-MoE, OLMoE, gpt-oss: one block and its variations.

RoPE is half-rotated on both sides, so no row of q or k moves. Each expert is apart there, all are stacked here. The
loss that balances experts, of L layers with experts, k of E experts for a token, f_le the choices of expert e in layer
l over the tokens (they sum up to k) and P_le its mean probability:

    there   c E sum_e (mean_l f_le) (mean_l P_le)          c: router_aux_loss_coef
    here    a E/k sum_l sum_e f_le P_le                    a: moe_aux_loss_coeff = c k/L

With one such layer they are the same, and with layers of the same loads their gradients are. Else there the mean over
layers is balanced, and here each layer.

gpt-oss (arXiv 2508.10925) has experts and attention sinks in every block, a window in every second, biases everywhere.
All experts of a block are one tensor there, whose columns alternate gate and value: `[E, h, 2f]`, and `[E, f, h]` on
the way down. What is published has them in MXFP4 (`quantized.py`); transformers writes them in 16 bits.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megalite.config import Experts, ModelConfig, pattern_text
from megalite.convert.family import GROUPED, STACKED, HuggingFaceFamily, LayerRule, Renamed, TensorForm
from megalite.convert.fields import MOST_LAYERS, Fields, read_common, write_common

ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu"}

RULES = (
    LayerRule("embedding.word_embeddings", ("model.embed_tokens",)),
    *Renamed({"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}),
    *Renamed({"attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}, form=GROUPED),
    *Renamed({"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}),
    *Renamed({"attention.proj": "self_attn.o_proj", "mlp.fc2": "mlp.down_proj"}),
    *Renamed({"mlp.fc1": ("mlp.gate_proj", "mlp.up_proj")}, form=STACKED),
    LayerRule("head.final_norm", ("model.norm",)),
    LayerRule("head.output", ("lm_head",)),
)
# Gate and value of every expert: 2E tensors there, `[E, 2, f, h]` here.
STACKED_PAIRS = TensorForm(
    lambda model, t: list(t.flatten(0, 1).unbind()), lambda model, parts: torch.stack(list(parts)).unflatten(0, (-1, 2))
)
MOST_EXPERTS = 4096
MIXTRAL_BLOCK, QWEN_BLOCK = "model.layers.{i}.block_sparse_moe.", "model.layers.{i}.mlp."
ROUTER, FC1, FC2 = "layers.{i}.mlp.router", "layers.{i}.mlp.experts.fc1", "layers.{i}.mlp.experts.fc2"
MIXTRAL_RULES = (
    *RULES,
    *Renamed({"mlp.router": "gate"}, MIXTRAL_BLOCK),
    *Renamed({"mlp.experts.fc1": ("experts.{e}.w1", "experts.{e}.w3")}, MIXTRAL_BLOCK, STACKED_PAIRS),
    *Renamed({"mlp.experts.fc2": "experts.{e}.w2"}, MIXTRAL_BLOCK, STACKED),
)
QWEN_RULES = (
    *RULES,
    LayerRule(ROUTER, (QWEN_BLOCK + "gate",)),
    LayerRule(FC1, (QWEN_BLOCK + "experts.{e}.gate_proj", QWEN_BLOCK + "experts.{e}.up_proj"), STACKED_PAIRS),
    LayerRule(FC2, (QWEN_BLOCK + "experts.{e}.down_proj",), STACKED),
)
GPT_OSS_EXPERTS = QWEN_BLOCK + "experts."
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
    LayerRule(FC1 + ".weight", (GPT_OSS_EXPERTS + "gate_up_proj",), ALTERNATING),
    LayerRule(FC1 + ".bias", (GPT_OSS_EXPERTS + "gate_up_proj_bias",), ALTERNATING_BIAS),
    LayerRule(FC2 + ".weight", (GPT_OSS_EXPERTS + "down_proj",), TURNED),
    LayerRule(FC2 + ".bias", (GPT_OSS_EXPERTS + "down_proj_bias",)),
)
GPT_OSS_FIXED = {"attention_bias": True, "swiglu_alpha": 1.702, "hidden_act": "silu"}
COEFFICIENT = "router_aux_loss_coef"


def read_shape(fields: Fields, epsilon: float = 1e-6, **more: Any) -> ModelConfig:
    """The settings that all these families share, and `more` of one family. epsilon: of its norms where the file has
    none. Raises ConfigError."""
    fields.only("pretraining_tp", 1)
    fields.only("partial_rotary_factor", 1, 1.0)
    shape = read_common(fields, ACTIVATIONS, "silu")
    heads, hidden = shape["num_attention_heads"], shape["hidden_size"]
    absent = fields.get("head_dim") is None and hidden % heads == 0
    values: dict[str, Any] = dict(
        num_query_groups=fields.integer("num_key_value_heads", heads),
        kv_channels=None if absent else fields.integer("head_dim", max(1, hidden // heads)),
        normalization="RMSNorm",
        norm_epsilon=fields.number("rms_norm_eps", epsilon),
        add_bias_linear=False,
    )
    return ModelConfig(model_type="llama", **(shape | values | more))


def write_shape(model: ModelConfig) -> dict[str, Any]:
    """The entries of config.json that all these families share."""
    own = {"num_key_value_heads": model.query_groups, "rms_norm_eps": model.norm_epsilon}
    width = {} if model.kv_channels is None else {"head_dim": model.kv_channels}
    return write_common(model, ACTIVATIONS) | own | width


def _read_llama(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    if fields.flag("mlp_bias", False) != bias:
        raise fields.wrong("attention_bias", bias, "not supported with another mlp_bias")
    return read_shape(fields, add_bias_linear=bias)


def _write_llama(model: ModelConfig) -> Mapping[str, Any]:
    bias = model.add_bias_linear
    return write_shape(model) | {"attention_bias": bias, "mlp_bias": bias, "pretraining_tp": 1}


def _read_mistral(fields: Fields, **more: Any) -> ModelConfig:
    """Llama with a window in all layers, and `more` of Mixtral."""
    window = fields.integer("sliding_window") if fields.get("sliding_window") is not None else None
    return read_shape(fields, window_size=window, **more)


def _write_mistral(model: ModelConfig) -> dict[str, Any]:
    return write_shape(model) | {"sliding_window": model.window_size}


LAYER_KINDS = {"full_attention": False, "sliding_attention": True}
"""Whether a layer has the window, in the words of `layer_types`."""


def write_windows(model: ModelConfig) -> dict[str, Any]:
    """Which layers have the window, and a length for those that have none."""
    full, sliding = LAYER_KINDS
    kinds = [sliding if model.has_window(index) else full for index in range(model.num_layers)]
    return {"sliding_window": model.window_size or model.max_positions, "layer_types": kinds}


def windows(fields: Fields, having: Sequence[bool], usual: int | None = None) -> dict[str, Any]:
    """The window (`usual` where the file has none), and which layers have it."""
    if not any(having):
        return {}
    pattern = None if all(having) else pattern_text(having)
    return {"window_size": fields.integer("sliding_window", usual), "window_attn_skip_freq": pattern}


def _read_qwen_window(fields: Fields) -> dict[str, Any]:
    """The first `max_window_layers` layers have none; `layer_types`, where it is there, says it of each."""
    kinds = fields.get("layer_types")
    if not fields.flag("use_sliding_window", False):
        if isinstance(kinds, list) and set(map(str, kinds)) != {"full_attention"}:
            raise fields.wrong("layer_types", kinds, "not supported without use_sliding_window")
        return {}
    first = fields.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise fields.wrong("max_window_layers", first, "is not a number of layers")
    return windows(fields, fields.of_layers("layer_types", LAYER_KINDS, lambda index: index >= first))


def _write_qwen(model: ModelConfig) -> dict[str, Any]:
    having = [model.has_window(index) for index in range(model.num_layers)]
    first = having.index(True) if any(having) else model.num_layers
    return write_shape(model) | {
        **write_windows(model),
        "use_sliding_window": any(having),
        "sliding_window": model.window_size,
        "max_window_layers": first,
    }


def write_qwen3(model: ModelConfig) -> dict[str, Any]:
    """The entries of Qwen3, whose blocks Qwen3-MoE has."""
    # there an absent head_dim is 128
    return _write_qwen(model) | {"head_dim": model.head_dim, "attention_bias": False}


def read_qwen3(fields: Fields) -> ModelConfig:
    """Qwen3, or what Qwen3-MoE has of it. Raises ConfigError."""
    fields.only("attention_bias", False)
    width = fields.integer("head_dim", 128)
    return read_shape(fields, qk_layernorm=True, kv_channels=width, **_read_qwen_window(fields))


def read_balance(fields: Fields, layers: int, default: float) -> float:
    """Our coefficient of the balancing loss. layers: how many have experts; default: the family's."""
    theirs = fields.number(COEFFICIENT, default) if fields.get(COEFFICIENT, default) != 0 else 0.0
    return _carried(theirs * fields.integer("num_experts_per_tok"), layers)


def write_experts(model: ModelConfig, number: str = "num_experts") -> dict[str, Any]:
    """What `read_experts` and `read_balance` read."""
    given, k = model.experts, model.experts.moe_router_topk
    balance = _carried(given.moe_aux_loss_coeff * sum(model.sparse_layers), k)
    return {number: given.num_experts, "num_experts_per_tok": k, COEFFICIENT: balance}


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
    return _read_mistral(fields, experts=experts)


def _write_mixtral(model: ModelConfig) -> Mapping[str, Any]:
    width = {"intermediate_size": model.expert_ffn_size}
    return _write_mistral(model) | width | write_experts(model, "num_local_experts")


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
    return write_qwen3(model) | {
        "moe_intermediate_size": model.expert_ffn_size,
        "norm_topk_prob": not model.experts.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, sparse in enumerate(model.sparse_layers) if not sparse],
        **write_experts(model),
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
    return read_shape(fields, 1e-5, qk_layernorm=True, qk_layernorm_across_heads=True, experts=experts)


def _write_olmoe(model: ModelConfig) -> Mapping[str, Any]:
    return write_shape(model) | {
        "intermediate_size": model.expert_ffn_size,
        "norm_topk_prob": not model.experts.moe_router_pre_softmax,
        "attention_bias": False,
        "clip_qkv": None,
        **write_experts(model),
    }


def _read_gpt_oss(fields: Fields) -> ModelConfig:
    fields.fixed(GPT_OSS_FIXED)
    having = fields.of_layers("layer_types", LAYER_KINDS, lambda index: index % 2 == 0)
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


def _write_gpt_oss(model: ModelConfig) -> dict[str, Any]:
    return write_shape(model) | {
        "intermediate_size": model.expert_ffn_size,
        "head_dim": model.head_dim,
        **GPT_OSS_FIXED,
        "swiglu_limit": model.activation_func_clamp_value or 7.0,
        **write_windows(model),
        **write_experts(model, "num_local_experts"),
    }


LLAMA = HuggingFaceFamily("llama", "LlamaForCausalLM", RULES, _read_llama, _write_llama)
MISTRAL = HuggingFaceFamily("mistral", "MistralForCausalLM", RULES, _read_mistral, _write_mistral)
QWEN2 = HuggingFaceFamily(
    "qwen2", "Qwen2ForCausalLM", RULES,
    lambda fields: read_shape(fields, add_qkv_bias=True, **_read_qwen_window(fields)), _write_qwen,
)  # fmt: skip
QWEN3 = HuggingFaceFamily("qwen3", "Qwen3ForCausalLM", RULES, read_qwen3, write_qwen3)
MIXTRAL = HuggingFaceFamily("mixtral", "MixtralForCausalLM", MIXTRAL_RULES, _read_mixtral, _write_mixtral)
QWEN3_MOE = HuggingFaceFamily("qwen3_moe", "Qwen3MoeForCausalLM", QWEN_RULES, read_qwen3_moe, write_qwen3_moe)
OLMOE = HuggingFaceFamily("olmoe", "OlmoeForCausalLM", QWEN_RULES, _read_olmoe, _write_olmoe)
GPT_OSS = HuggingFaceFamily("gpt_oss", "GptOssForCausalLM", GPT_OSS_RULES, _read_gpt_oss, _write_gpt_oss)
