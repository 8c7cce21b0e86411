"""Mixtral, Qwen3-MoE and OLMoE: Llama's blocks with experts, each expert apart there, all stacked here.

The loss that balances them, of L layers with experts, k of E experts for a token, f_le the choices of expert e in layer
l over the tokens (they sum up to k) and P_le its mean probability:

    there   c E sum_e (mean_l f_le) (mean_l P_le)          c: router_aux_loss_coef
    here    a E/k sum_l sum_e f_le P_le                    a: moe_aux_loss_coeff = c k/L

With one such layer they are the same, and with layers of the same loads their gradients are. Else there the mean over
layers is balanced, and here each layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from megalite.config import Experts, ModelConfig, pattern_text
from megalite.convert.family import HuggingFaceFamily, LayerRule, TensorForm
from megalite.convert.fields import Fields
from megalite.convert.llama import IGNORED, RULES, read_qwen3, read_shape, read_window, write_qwen3, write_shape

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


def _read_balance(fields: Fields, layers: int, default: float) -> float:
    """Our coefficient of the balancing loss. layers: how many have experts; default: the family's."""
    theirs = fields.number(COEFFICIENT, default) if fields.get(COEFFICIENT, default) != 0 else 0.0
    return _carried(theirs * fields.integer("num_experts_per_tok"), layers)


def _write_balance(model: ModelConfig) -> dict[str, Any]:
    given = model.experts
    return {COEFFICIENT: _carried(given.moe_aux_loss_coeff * sum(model.sparse_layers), given.moe_router_topk)}


def _carried(coefficient: float, divisor: int) -> float:
    """The quotient, short of the digits that would keep it from coming back as it was."""
    return float(f"{coefficient / divisor:.14g}")


def _numbers(fields: Fields, number: str) -> dict[str, Any]:
    experts = fields.integer(number)
    if not 2 <= experts <= MOST_EXPERTS:
        raise fields.wrong(number, experts, f"not supported (2 to {MOST_EXPERTS})")
    k = fields.integer("num_experts_per_tok")
    if k > experts:
        raise fields.wrong("num_experts_per_tok", k, f"is more than {number}")
    return {"num_experts": experts, "moe_router_topk": k}


def _read_mixtral(fields: Fields) -> ModelConfig:
    fields.only("router_jitter_noise", 0, 0.0)
    coefficient = _read_balance(fields, fields.integer("num_hidden_layers"), 0.001)
    experts = Experts(**_numbers(fields, "num_local_experts"), moe_aux_loss_coeff=coefficient)
    return read_shape(fields, window_size=read_window(fields), experts=experts)


def _write_mixtral(model: ModelConfig) -> Mapping[str, Any]:
    return write_shape(model) | {
        "intermediate_size": model.expert_ffn_size,
        "num_local_experts": model.experts.num_experts,
        "num_experts_per_tok": model.experts.moe_router_topk,
        "sliding_window": model.window_size,
        **_write_balance(model),
    }


def _read_qwen3_moe(fields: Fields) -> ModelConfig:
    model = read_qwen3(fields)
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.wrong("mlp_only_layers", dense, "is not a list of layers")
    layers = [(index + 1) % step == 0 and index not in dense for index in range(min(model.num_layers, 10_000))]
    if not any(layers):
        raise fields.wrong("mlp_only_layers", dense, "leaves no layer with experts")
    experts = Experts(
        **_numbers(fields, "num_experts" if "num_experts" in fields.raw else "num_local_experts"),
        moe_ffn_hidden_size=fields.integer("moe_intermediate_size"),
        moe_router_pre_softmax=not fields.flag("norm_topk_prob", False),
        moe_layer_freq=pattern_text(layers),
        moe_aux_loss_coeff=_read_balance(fields, sum(layers), 0.001),
    )
    return dataclasses.replace(model, experts=experts)


def _write_qwen3_moe(model: ModelConfig) -> Mapping[str, Any]:
    given = model.experts
    return write_qwen3(model) | {
        "num_experts": given.num_experts,
        "num_experts_per_tok": given.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn_size,
        "norm_topk_prob": not given.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, sparse in enumerate(model.sparse_layers) if not sparse],
        **_write_balance(model),
    }


def _read_olmoe(fields: Fields) -> ModelConfig:
    fields.only("attention_bias", False)
    fields.only("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    if fields.get("clip_qkv") is not None:
        raise fields.wrong("clip_qkv", fields.get("clip_qkv"), "not supported (only null)")
    experts = Experts(
        **_numbers(fields, "num_experts" if "num_experts" in fields.raw else "num_local_experts"),
        moe_router_pre_softmax=not fields.flag("norm_topk_prob", False),
        moe_aux_loss_coeff=_read_balance(fields, fields.integer("num_hidden_layers"), 0.01),
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
        **_write_balance(model),
    }


MIXTRAL = HuggingFaceFamily(
    "mixtral", "MixtralForCausalLM", "model.", MIXTRAL_RULES, _read_mixtral, _write_mixtral, IGNORED
)
QWEN3_MOE = HuggingFaceFamily(
    "qwen3_moe", "Qwen3MoeForCausalLM", "model.", QWEN_RULES, _read_qwen3_moe, _write_qwen3_moe, IGNORED
)
OLMOE = HuggingFaceFamily("olmoe", "OlmoeForCausalLM", "model.", QWEN_RULES, _read_olmoe, _write_olmoe, IGNORED)
