"""Qwen3.5's text models: Qwen3-Next with a plain MLP, or with experts whose weights are always normalised. Projections
of a DeltaNet are apart there, each with all heads; here they are grouped by key head.

Published folders have a part for images beside (`qwen3_5`, `qwen3_5_moe`): what is under `text_config` and
`model.language_model.` is read, the rest is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.convert.family import HuggingFaceFamily, LayerRule, TensorForm
from megalite.convert.fields import Fields
from megalite.convert.llama import FC1, FC2, QWEN_BLOCK, read_qwen3, read_qwen3_moe, write_qwen3, write_qwen3_moe
from megalite.convert.qwen3_next import LINEAR, NEXT_RULES, read_mixed, write_mixed

FIXED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""What Qwen3-Next's files say of experts, and these do not."""


def _apart(model: ModelConfig, qkvz: Tensor) -> list[Tensor]:
    dk, values = model.delta.linear_key_head_dim, model.delta.mixed - 2 * model.delta.linear_key_head_dim
    rows = qkvz.unflatten(0, (model.delta.linear_num_key_heads, -1))
    *qkv, z = (part.flatten(0, 1) for part in rows.split((dk, dk, values, values), 1))
    return [torch.cat(qkv), z]


def _together(model: ModelConfig, parts: Sequence[Tensor]) -> Tensor:
    given = model.delta
    size = given.linear_num_key_heads * given.linear_key_head_dim
    whole = (*parts[0].split((size, size, given.value_size)), parts[1])
    return torch.cat([part.unflatten(0, (given.linear_num_key_heads, -1)) for part in whole], 1).flatten(0, 1)


def _two(model: ModelConfig, ba: Tensor) -> list[Tensor]:
    return [half.flatten(0, 1) for half in ba.unflatten(0, (model.delta.linear_num_key_heads, -1)).chunk(2, 1)]


def _one(model: ModelConfig, parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.unflatten(0, (model.delta.linear_num_key_heads, -1)) for part in parts], 1).flatten(0, 1)


QKVZ, BA = "layers.{i}.attention.qkvz", "layers.{i}.attention.ba"
RULES = (
    *(rule for rule in NEXT_RULES if rule.ours not in (QKVZ, BA)),
    LayerRule(QKVZ, (LINEAR + "in_proj_qkv", LINEAR + "in_proj_z"), TensorForm(_apart, _together)),
    LayerRule(BA, (LINEAR + "in_proj_b", LINEAR + "in_proj_a"), TensorForm(_two, _one)),
)
GATE_UP = TensorForm(lambda model, t: [t.flatten(1, 2)], lambda model, parts: parts[0].unflatten(1, (2, -1)))
STACKED = (
    LayerRule(FC1 + ".weight", (QWEN_BLOCK + "experts.gate_up_proj",), GATE_UP),
    LayerRule(FC2 + ".weight", (QWEN_BLOCK + "experts.down_proj",)),
)


def _read(fields: Fields) -> ModelConfig:
    return read_mixed(fields, read_qwen3)


def _write(model: ModelConfig) -> dict[str, Any]:
    return write_mixed(model, write_qwen3(model))


def _read_moe(fields: Fields) -> ModelConfig:
    width = fields.raw.get("intermediate_size", fields.integer("moe_intermediate_size", 512))
    return read_mixed(fields.but(intermediate_size=width, **FIXED), read_qwen3_moe)


def _write_moe(model: ModelConfig) -> dict[str, Any]:
    written = write_mixed(model, dict(write_qwen3_moe(model)))
    return {name: value for name, value in written.items() if name not in (*FIXED, "intermediate_size")}


QWEN3_5 = HuggingFaceFamily("qwen3_5_text", "Qwen3_5ForCausalLM", RULES, _read, _write, True)
QWEN3_5_MOE = HuggingFaceFamily(
    "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", RULES, _read_moe, _write_moe, True, STACKED
)
