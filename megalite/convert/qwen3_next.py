"""Qwen3-Next: Gated DeltaNet in three of four layers, gated attention with partly rotated heads in the others, norms of
1 + weight, and experts beside a gated one that all tokens take.

The projections of a DeltaNet are grouped by key head there as here; the channels of its convolution are all queries,
all keys, all values there.

Qwen3.5's text models are the same with a plain MLP, or with experts whose weights are always normalised. Their
projections are apart, each with all heads. Published folders have a part for images beside (`qwen3_5`, `qwen3_5_moe`):
what is under `text_config` and `model.language_model.` is read, the rest is left out.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.config import Delta, ModelConfig, pattern_text
from megalite.convert.family import STACKED, HuggingFaceFamily, LayerRule, Renamed, TensorForm
from megalite.convert.fields import Fields, read_rotary_share, with_rotary_share
from megalite.convert.llama import (
    FC1,
    FC2,
    QWEN_BLOCK,
    QWEN_RULES,
    read_qwen3,
    read_qwen3_moe,
    write_qwen3,
    write_qwen3_moe,
)

LINEAR = "model.layers.{i}.linear_attn."
KINDS = {"full_attention": False, "linear_attention": True}


def _apart(rows: Tensor, *sizes: int) -> list[Tensor]:
    """`[H, c, ...]` -> `[H * size, ...]`: each part of the channels of all key heads."""
    return [part.flatten(0, 1) for part in rows.split(sizes, 1)]


def _together(model: ModelConfig, parts: Iterable[Tensor]) -> Tensor:
    """The inverse."""
    return torch.cat([_grouped(model, part) for part in parts], 1)


def _sizes(model: ModelConfig) -> tuple[int, int, int]:
    """Channels of a key head: its query, its key, its values."""
    dk = model.delta.linear_key_head_dim
    return dk, dk, model.delta.mixed - 2 * dk


def _by_kind(model: ModelConfig, rows: Tensor) -> list[Tensor]:
    """All queries, all keys, all values."""
    return list(rows.split([model.delta.linear_num_key_heads * size for size in _sizes(model)]))


def _grouped(model: ModelConfig, rows: Tensor) -> Tensor:
    return rows.reshape(model.delta.linear_num_key_heads, -1, *rows.shape[1:])


def _qkv_and_z(model: ModelConfig, qkvz: Tensor) -> list[Tensor]:
    sizes = _sizes(model)
    *qkv, z = _apart(_grouped(model, qkvz), *sizes, sizes[2])
    return [torch.cat(qkv), z]


CONV = TensorForm(
    lambda model, t: [torch.cat(_apart(t, *_sizes(model)))[:, None]],
    lambda model, parts: _together(model, _by_kind(model, parts[0][:, 0])),
)
QKV_AND_Z = TensorForm(
    _qkv_and_z, lambda model, parts: _together(model, (*_by_kind(model, parts[0]), parts[1])).flatten(0, 1)
)
B_AND_A = TensorForm(
    lambda model, t: _apart(_grouped(model, t), model.delta.group, model.delta.group),
    lambda model, parts: _together(model, parts).flatten(0, 1),
)
GATE_UP = TensorForm(lambda model, t: [t.flatten(1, 2)], lambda model, parts: parts[0].unflatten(1, (2, -1)))
NEXT_RULES = (
    *QWEN_RULES,
    LayerRule("layers.{i}.attention.conv", (LINEAR + "conv1d.weight",), CONV),
    *Renamed({"attention.dt_bias": "dt_bias", "attention.a_log": "A_log", "attention.norm": "norm"}, LINEAR),
    *Renamed({"attention.qkvz": "in_proj_qkvz", "attention.ba": "in_proj_ba", "attention.out": "out_proj"}, LINEAR),
    *Renamed({"mlp.shared_gate": "shared_expert_gate"}, QWEN_BLOCK),
    *Renamed({"mlp.shared_experts.fc1": ("gate_proj", "up_proj")}, QWEN_BLOCK + "shared_expert.", STACKED),
    *Renamed({"mlp.shared_experts.fc2": "shared_expert.down_proj"}, QWEN_BLOCK),
)
RULES_3_5 = (
    *NEXT_RULES,
    *Renamed({"attention.qkvz": ("in_proj_qkv", "in_proj_z")}, LINEAR, QKV_AND_Z),
    *Renamed({"attention.ba": ("in_proj_b", "in_proj_a")}, LINEAR, B_AND_A),
)
STACKED_EXPERTS = (
    LayerRule(FC1 + ".weight", (QWEN_BLOCK + "experts.gate_up_proj",), GATE_UP),
    LayerRule(FC2 + ".weight", (QWEN_BLOCK + "experts.down_proj",)),
)
FIXED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""What Qwen3-Next's files say of experts, and Qwen3.5's do not."""
SIZES = {
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
"""What each is where a file does not say it."""


def _read(fields: Fields, read: Callable[[Fields], ModelConfig]) -> ModelConfig:
    """A model with DeltaNet in some layers. read: what it has of a family without. Raises ConfigError."""
    step = fields.integer("full_attention_interval", 4)
    linear = fields.of_layers("layer_types", KINDS, lambda index: (index + 1) % step > 0)
    width = fields.integer("head_dim", 256)
    model = read(fields.but(layer_types=None, partial_rotary_factor=None, head_dim=width))
    sizes = {name: fields.integer(name, usual) for name, usual in SIZES.items()}
    pattern = None if all(linear) else pattern_text(linear)
    experts = model.experts
    if experts.num_experts is not None:  # beside them is one that all tokens take
        beside = fields.integer("shared_expert_intermediate_size", 512)
        experts = dataclasses.replace(experts, moe_shared_expert_intermediate_size=beside, moe_shared_expert_gate=True)
    given = Delta(experimental_attention_variant="gdn", linear_attention_freq=pattern, **sizes)
    return dataclasses.replace(
        model,
        delta=given if any(linear) else Delta(),
        rotary_percent=read_rotary_share(fields, 0.25),
        apply_layernorm_1p=True,
        attention_output_gate=True,
        experts=experts,
    )


def _write(model: ModelConfig, write: Callable[[ModelConfig], Mapping[str, Any]]) -> dict[str, Any]:
    """write: the entries of a family without DeltaNet."""
    given, some = model.delta, model.delta.experimental_attention_variant is not None
    full, linear, width = *KINDS, model.experts.moe_shared_expert_intermediate_size
    layers = [some and model.listed("linear_attention_freq", index) for index in range(model.num_layers)]
    left_out = ("use_sliding_window", "sliding_window", "max_window_layers")
    return {
        **{name: value for name, value in with_rotary_share(model, write(model)).items() if name not in left_out},
        "layer_types": [linear if layer else full for layer in layers],
        **({} if width is None else {"shared_expert_intermediate_size": width}),
        **{name: getattr(given, name) for name in SIZES},
    }


def _read_moe(fields: Fields) -> ModelConfig:
    width = fields.raw.get("intermediate_size", fields.integer("moe_intermediate_size", 512))
    return _read(fields.but(intermediate_size=width, **FIXED), read_qwen3_moe)


def _write_moe(model: ModelConfig) -> dict[str, Any]:
    written = _write(model, write_qwen3_moe)
    return {name: value for name, value in written.items() if name not in (*FIXED, "intermediate_size")}


QWEN3_NEXT = HuggingFaceFamily(
    "qwen3_next", "Qwen3NextForCausalLM", NEXT_RULES,
    partial(_read, read=read_qwen3_moe), partial(_write, write=write_qwen3_moe), True,
)  # fmt: skip
QWEN3_5 = HuggingFaceFamily(
    "qwen3_5_text", "Qwen3_5ForCausalLM", RULES_3_5,
    partial(_read, read=read_qwen3), partial(_write, write=write_qwen3), True,
)  # fmt: skip
QWEN3_5_MOE = HuggingFaceFamily(
    "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", RULES_3_5, _read_moe, _write_moe, True, STACKED_EXPERTS
)
