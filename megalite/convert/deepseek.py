"""DeepSeek-V3 (arXiv 2412.19437), Kimi K2 (2507.20534) and GLM-4.7-Flash: latent attention, some dense layers in front,
then experts that are chosen by sigmoids and a bias. GLM-4.5 (2508.06471) has the same experts behind grouped
queries.

Their RoPE turns neighbouring channels (0, 1), (2, 3), ...; here the first half of the channels is turned with the
second. So the rows of the rotated channels are reordered: evens, then odds.

A group of experts counts by its best two there, and by its best k / groups here: where these differ a model is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megalite.config import Experts, FurtherTokens, Latent, ModelConfig, pattern_text
from megalite.convert.family import HuggingFaceFamily, LayerRule, TensorForm
from megalite.convert.fields import MOST_LAYERS, Fields
from megalite.convert.llama import IGNORED, QWEN_BLOCK, QWEN_RULES, STACKED, read_experts, read_shape, write_shape

ATTENTION = "model.layers.{i}.self_attn."
EPSILON = 1e-6
"""Of the norms of the small vectors, in all of these families."""
LAYER_TYPES = {"dense": False, "sparse": True}


def _reordered(rows: Tensor, channels: int, rotated: int, *, inwards: bool) -> Tensor:
    """`[n channels, ...]` with the last `rotated` of each `channels` rows as they are here (`inwards`) or there."""
    heads = rows.unflatten(0, (-1, channels))
    kept, turned = heads.split((channels - rotated, rotated), 1)
    shape = (-1, 2) if inwards else (2, -1)
    turned = turned.unflatten(1, shape).transpose(1, 2).flatten(1, 2)
    return torch.cat((kept, turned), 1).flatten(0, 1)


def _queries(model: ModelConfig, rows: Tensor, inwards: bool) -> Tensor:
    return _reordered(rows, model.latent.qk_channels, model.latent.qk_pos_emb_head_dim, inwards=inwards)


def _keys(model: ModelConfig, rows: Tensor, inwards: bool) -> Tensor:
    return _reordered(rows, model.latent.compressed, model.latent.qk_pos_emb_head_dim, inwards=inwards)


QUERIES = TensorForm(lambda model, t: [_queries(model, t, False)], lambda model, parts: _queries(model, parts[0], True))
KEYS = TensorForm(lambda model, t: [_keys(model, t, False)], lambda model, parts: _keys(model, parts[0], True))
BEHIND = "model.layers.{i}."
SPARSE_RULES = (
    *QWEN_RULES,
    LayerRule("mtp.{i}.e_norm", (BEHIND + "enorm",)),
    LayerRule("mtp.{i}.h_norm", (BEHIND + "hnorm",)),
    LayerRule("mtp.{i}.proj", (BEHIND + "eh_proj",)),
    LayerRule("mtp.{i}.norm", (BEHIND + "shared_head.norm",)),
    LayerRule("layers.{i}.mlp.router.expert_bias", (QWEN_BLOCK + "gate.e_score_correction_bias",)),
    LayerRule(
        "layers.{i}.mlp.shared_experts.fc1",
        (QWEN_BLOCK + "shared_experts.gate_proj", QWEN_BLOCK + "shared_experts.up_proj"),
        STACKED,
    ),
    LayerRule("layers.{i}.mlp.shared_experts.fc2", (QWEN_BLOCK + "shared_experts.down_proj",)),
)
LATENT_RULES = (
    *SPARSE_RULES,
    LayerRule("layers.{i}.attention.q", (ATTENTION + "q_proj",), QUERIES),
    LayerRule("layers.{i}.attention.q_down", (ATTENTION + "q_a_proj",)),
    LayerRule("layers.{i}.attention.q_down_norm", (ATTENTION + "q_a_layernorm",)),
    LayerRule("layers.{i}.attention.q_up", (ATTENTION + "q_b_proj",), QUERIES),
    LayerRule("layers.{i}.attention.kv_down", (ATTENTION + "kv_a_proj_with_mqa",), KEYS),
    LayerRule("layers.{i}.attention.kv_down_norm", (ATTENTION + "kv_a_layernorm",)),
    LayerRule("layers.{i}.attention.kv_up", (ATTENTION + "kv_b_proj",)),
)


def _sparse(fields: Fields, dense: int) -> Experts:
    """The experts; dense: layers in front without any, where the file does not say it."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    layers = [index >= _whole(fields, "first_k_dense_replace", dense) for index in range(_layers(fields))]
    kinds = fields.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != len(layers) or not all(kind in LAYER_TYPES for kind in kinds):
            raise fields.wrong("mlp_layer_types", kinds, f"is not a list of {len(layers)} of {', '.join(LAYER_TYPES)}")
        layers = [LAYER_TYPES[kind] for kind in kinds]
    if not any(layers):
        raise fields.wrong("first_k_dense_replace", fields.get("first_k_dense_replace"), "leaves no layer with experts")
    numbers, width = read_experts(fields, "n_routed_experts"), fields.integer("moe_intermediate_size")
    k, shared = numbers["moe_router_topk"], _whole(fields, "n_shared_experts", 1)
    fields.only("norm_topk_prob", k > 1)
    factor = fields.number("routed_scaling_factor", 1.0)
    return Experts(
        **numbers,
        **_groups(fields, k),
        moe_ffn_hidden_size=width,
        moe_layer_freq=pattern_text(layers),
        moe_shared_expert_intermediate_size=shared * width or None,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=None if factor == 1.0 else factor,
    )


def _groups(fields: Fields, k: int) -> dict[str, Any]:
    groups, best = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if groups == best:
        return {}
    if k // best != 2:
        what = f"not supported with topk_group {best} and {k} experts of a token (2 times topk_group of them)"
        raise fields.wrong("n_group", groups, what)
    return {"moe_router_num_groups": groups, "moe_router_group_topk": best}


def _layers(fields: Fields) -> int:
    return min(fields.integer("num_hidden_layers"), MOST_LAYERS)


def _further(fields: Fields) -> FurtherTokens:
    return FurtherTokens(mtp_num_layers=_whole(fields, "num_nextn_predict_layers", 0) or None)


def _whole(fields: Fields, key: str, default: int) -> int:
    value = fields.get(key, default)
    if type(value) is not int or value < 0:
        raise fields.wrong(key, value, "is not a number from 0 on")
    return value


def _write_sparse(model: ModelConfig) -> dict[str, Any]:
    given, sparse = model.experts, model.sparse_layers
    return {
        "n_routed_experts": given.num_experts,
        "n_shared_experts": (given.moe_shared_expert_intermediate_size or 0) // max(1, model.expert_ffn_size),
        "num_experts_per_tok": given.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn_size,
        "first_k_dense_replace": sparse.index(True) if any(sparse) else len(sparse),
        "n_group": given.moe_router_num_groups or 1,
        "topk_group": given.moe_router_group_topk or 1,
        "routed_scaling_factor": given.moe_router_topk_scaling_factor or 1.0,
        "norm_topk_prob": given.moe_router_topk > 1,
        "num_nextn_predict_layers": model.further.depth,
    }


def _read_latent(fields: Fields, dense: int, epsilon: float = EPSILON) -> ModelConfig:
    fields.only("rope_interleave", True)
    fields.only("attention_bias", False)
    fields.only("num_key_value_heads", fields.integer("num_attention_heads"))
    ranks = fields.get("q_lora_rank")
    raw = dict(fields.raw) | {"rms_norm_eps": fields.number("rms_norm_eps", epsilon)}
    model = read_shape(
        Fields(raw, fields.where),
        num_query_groups=None,
        kv_channels=None,
        qk_layernorm=True,
        latent=Latent(
            multi_latent_attention=True,
            q_lora_rank=None if ranks is None else fields.integer("q_lora_rank"),
            kv_lora_rank=fields.integer("kv_lora_rank"),
            qk_head_dim=fields.integer("qk_nope_head_dim"),
            qk_pos_emb_head_dim=fields.integer("qk_rope_head_dim"),
            v_head_dim=fields.integer("v_head_dim"),
            latent_norm_epsilon=EPSILON,
        ),
        experts=_sparse(fields, dense),
        further=_further(fields),
    )
    scaling = fields.section("rope_parameters").raw or fields.section("rope_scaling").raw
    if model.rope_scaling.kind == "yarn" and scaling.get("mscale_all_dim") and not model.rope_scaling.mscale_all_dim:
        raise fields.wrong("mscale_all_dim", scaling["mscale_all_dim"], "not supported without mscale")
    return model


def _write_latent(model: ModelConfig) -> dict[str, Any]:
    given = model.latent
    return write_shape(dataclasses.replace(model, kv_channels=None)) | {
        "q_lora_rank": given.q_lora_rank,
        "kv_lora_rank": given.kv_lora_rank,
        "qk_nope_head_dim": given.qk_head_dim,
        "qk_rope_head_dim": given.qk_pos_emb_head_dim,
        "v_head_dim": given.v_head_dim,
        "rope_interleave": True,
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        **_write_sparse(model),
    }


def _write_lite(model: ModelConfig) -> dict[str, Any]:
    written = _write_latent(model)
    dense, sparse = LAYER_TYPES
    return written | {"mlp_layer_types": [sparse if layer else dense for layer in model.sparse_layers]}


def _read_glm(fields: Fields) -> ModelConfig:
    bias, scaling = fields.flag("attention_bias", False), fields.section("rope_parameters")
    part = scaling if scaling.get("partial_rotary_factor") is not None else fields
    raw = dict(fields.raw) | {"rms_norm_eps": fields.number("rms_norm_eps", 1e-5), "partial_rotary_factor": None}
    return read_shape(
        Fields(raw, fields.where),
        rotary_percent=part.number("partial_rotary_factor", 0.5),
        add_qkv_bias=bias,
        qk_layernorm=fields.flag("use_qk_norm", False),
        experts=_sparse(fields, 1),
        further=_further(fields),
    )


def _write_glm(model: ModelConfig) -> dict[str, Any]:
    written, part = write_shape(model), {"partial_rotary_factor": model.rotary_percent}
    return written | {
        "rope_parameters": written["rope_parameters"] | part,
        **part,
        "attention_bias": model.has_qkv_bias,
        "use_qk_norm": model.qk_layernorm,
        **_write_sparse(model),
    }


def _read_deepseek(fields: Fields) -> ModelConfig:
    return _read_latent(fields, 3)


def _read_lite(fields: Fields) -> ModelConfig:
    return _read_latent(fields, 1, 1e-5)


DEEPSEEK_V3 = HuggingFaceFamily(
    "deepseek_v3", "DeepseekV3ForCausalLM", "model.", LATENT_RULES, _read_deepseek, _write_latent, IGNORED, True
)
KIMI_K2 = HuggingFaceFamily(
    "kimi_k2", "DeepseekV3ForCausalLM", "model.", LATENT_RULES, _read_deepseek, _write_latent, IGNORED, True
)
GLM4_MOE_LITE = HuggingFaceFamily(
    "glm4_moe_lite", "Glm4MoeLiteForCausalLM", "model.", LATENT_RULES, _read_lite, _write_lite, IGNORED, True
)
GLM4_MOE = HuggingFaceFamily(
    "glm4_moe", "Glm4MoeForCausalLM", "model.", SPARSE_RULES, _read_glm, _write_glm, IGNORED, True
)
