"""DeepSeek-V3 (arXiv 2412.19437), Kimi K2 (2507.20534) and GLM-4.7-Flash: latent attention, some dense layers in front,
then experts that are chosen by sigmoids and a bias. GLM-4.5 (2508.06471) has the same experts behind grouped
queries.

Their RoPE turns neighbouring channels (0, 1), (2, 3), ...; here the first half of the channels is turned with the
second. So the rows of the rotated channels are reordered: evens, then odds.

A group of experts counts by its best two there, and by its best k / groups here: where these differ a model is refused.
"""

import dataclasses
from functools import partial
from typing import Any

from torch import Tensor

from megalite.config import Experts, FurtherTokens, Latent, ModelConfig, pattern_text
from megalite.convert.family import HuggingFaceFamily, Renamed, TensorForm, reordered
from megalite.convert.fields import Fields, read_rotary_share, with_rotary_share
from megalite.convert.llama import QWEN_BLOCK, QWEN_RULES, STACKED, read_experts, read_shape, write_shape

ATTENTION = "model.layers.{i}.self_attn."
EPSILON = 1e-6
"""Of the norms of the small vectors, in all of these families."""
FIXED = {"rope_interleave": True, "attention_bias": False}
CHOICE = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
LAYER_TYPES = {"dense": False, "sparse": True}
SIZES = {
    "kv_lora_rank": "kv_lora_rank", "qk_head_dim": "qk_nope_head_dim", "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}  # fmt: skip


def _turned(model: ModelConfig, rows: Tensor, channels: int, *, inwards: bool) -> Tensor:
    """The rotated rows, the last of each `channels`, in the other order."""
    return reordered(rows, channels, model.latent.qk_pos_emb_head_dim, inwards=inwards)


QUERIES = TensorForm(
    lambda model, t: [_turned(model, t, model.latent.qk_channels, inwards=False)],
    lambda model, parts: _turned(model, parts[0], model.latent.qk_channels, inwards=True),
)
KEYS = TensorForm(
    lambda model, t: [_turned(model, t, model.latent.compressed, inwards=False)],
    lambda model, parts: _turned(model, parts[0], model.latent.compressed, inwards=True),
)
SPARSE_RULES = (
    *QWEN_RULES,
    *Renamed({"e_norm": "enorm", "h_norm": "hnorm", "proj": "eh_proj", "norm": "shared_head.norm"}, ours="mtp.{i}."),
    *Renamed({"mlp.router.expert_bias": "gate.e_score_correction_bias"}, QWEN_BLOCK),
    *Renamed({"mlp.shared_experts.fc1": ("gate_proj", "up_proj")}, QWEN_BLOCK + "shared_experts.", STACKED),
    *Renamed({"mlp.shared_experts.fc2": "shared_experts.down_proj"}, QWEN_BLOCK),
)
LATENT_RULES = (
    *SPARSE_RULES,
    *Renamed({"attention.q": "q_proj", "attention.q_up": "q_b_proj"}, ATTENTION, QUERIES),
    *Renamed({"attention.q_down": "q_a_proj", "attention.q_down_norm": "q_a_layernorm"}, ATTENTION),
    *Renamed({"attention.kv_down": "kv_a_proj_with_mqa"}, ATTENTION, KEYS),
    *Renamed({"attention.kv_down_norm": "kv_a_layernorm", "attention.kv_up": "kv_b_proj"}, ATTENTION),
)


def _sparse(fields: Fields, dense: int) -> dict[str, Any]:
    """Experts, and further tokens; dense: layers in front without any, where the file does not say it."""
    fields.fixed({**CHOICE, "moe_layer_freq": 1})
    first = _whole(fields, "first_k_dense_replace", dense)
    layers = fields.of_layers("mlp_layer_types", LAYER_TYPES, lambda index: index >= first)
    if not any(layers):
        raise fields.wrong("first_k_dense_replace", fields.get("first_k_dense_replace"), "leaves no layer with experts")
    numbers, width = read_experts(fields, "n_routed_experts"), fields.integer("moe_intermediate_size")
    k, shared = numbers["moe_router_topk"], _whole(fields, "n_shared_experts", 1)
    fields.only("norm_topk_prob", k > 1)
    factor = fields.number("routed_scaling_factor", 1.0)
    experts = Experts(
        **numbers,
        **_groups(fields, k),
        moe_ffn_hidden_size=width,
        moe_layer_freq=pattern_text(layers),
        moe_shared_expert_intermediate_size=shared * width or None,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=None if factor == 1.0 else factor,
    )
    further = FurtherTokens(mtp_num_layers=_whole(fields, "num_nextn_predict_layers", 0) or None)
    return {"experts": experts, "further": further}


def _groups(fields: Fields, k: int) -> dict[str, Any]:
    groups, best = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if groups == best:
        return {}
    if k // best != 2:
        what = f"not supported with topk_group {best} and {k} experts of a token (2 times topk_group of them)"
        raise fields.wrong("n_group", groups, what)
    return {"moe_router_num_groups": groups, "moe_router_group_topk": best}


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
    fields.fixed(FIXED)
    fields.only("num_key_value_heads", fields.integer("num_attention_heads"))
    ranks = fields.get("q_lora_rank")
    model = read_shape(
        fields,
        epsilon,
        num_query_groups=None,
        kv_channels=None,
        qk_layernorm=True,
        latent=Latent(
            multi_latent_attention=True,
            q_lora_rank=None if ranks is None else fields.integer("q_lora_rank"),
            **{ours: fields.integer(theirs) for ours, theirs in SIZES.items()},
            latent_norm_epsilon=EPSILON,
        ),
        **_sparse(fields, dense),
    )
    scaling = fields.section("rope_parameters").raw or fields.section("rope_scaling").raw
    if model.rope_scaling.kind == "yarn" and scaling.get("mscale_all_dim") and not model.rope_scaling.mscale_all_dim:
        raise fields.wrong("mscale_all_dim", scaling["mscale_all_dim"], "not supported without mscale")
    return model


def _write_latent(model: ModelConfig) -> dict[str, Any]:
    given = model.latent
    return write_shape(dataclasses.replace(model, kv_channels=None)) | {
        "q_lora_rank": given.q_lora_rank,
        **{theirs: getattr(given, ours) for ours, theirs in SIZES.items()},
        **FIXED,
        **CHOICE,
        **_write_sparse(model),
    }


def _write_lite(model: ModelConfig) -> dict[str, Any]:
    written = _write_latent(model)
    dense, sparse = LAYER_TYPES
    return written | {"mlp_layer_types": [sparse if layer else dense for layer in model.sparse_layers]}


def _read_glm(fields: Fields) -> ModelConfig:
    return read_shape(
        fields.but(partial_rotary_factor=None),
        1e-5,
        rotary_percent=read_rotary_share(fields, 0.5),
        add_qkv_bias=fields.flag("attention_bias", False),
        qk_layernorm=fields.flag("use_qk_norm", False),
        **_sparse(fields, 1),
    )


def _write_glm(model: ModelConfig) -> dict[str, Any]:
    return with_rotary_share(model, write_shape(model)) | {
        "attention_bias": model.has_qkv_bias,
        "use_qk_norm": model.qk_layernorm,
        **_write_sparse(model),
    }


_read_deepseek = partial(_read_latent, dense=3)
_read_lite = partial(_read_latent, dense=1, epsilon=1e-5)
DEEPSEEK_V3 = HuggingFaceFamily(
    "deepseek_v3", "DeepseekV3ForCausalLM", LATENT_RULES, _read_deepseek, _write_latent, True
)
KIMI_K2 = HuggingFaceFamily("kimi_k2", "DeepseekV3ForCausalLM", LATENT_RULES, _read_deepseek, _write_latent, True)
GLM4_MOE_LITE = HuggingFaceFamily(
    "glm4_moe_lite", "Glm4MoeLiteForCausalLM", LATENT_RULES, _read_lite, _write_lite, True
)
GLM4_MOE = HuggingFaceFamily("glm4_moe", "Glm4MoeForCausalLM", SPARSE_RULES, _read_glm, _write_glm, True)
