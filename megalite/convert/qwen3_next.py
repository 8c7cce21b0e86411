"""Qwen3-Next: Gated DeltaNet in three of four layers, gated attention with partly rotated heads in the others, norms of
1 + weight, and experts beside a gated one that all tokens take.

The projections of a DeltaNet are grouped by key head there as here; the channels of its convolution are all queries,
all keys, all values there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.config import Delta, Experts, ModelConfig, pattern_text
from megalite.convert.family import STACKED, HuggingFaceFamily, LayerRule, Renamed, TensorForm
from megalite.convert.fields import Fields, read_rotary_share, with_rotary_share
from megalite.convert.llama import QWEN_BLOCK, QWEN_RULES, read_qwen3_moe, write_qwen3_moe

LINEAR = "model.layers.{i}.linear_attn."
KINDS = {"full_attention": False, "linear_attention": True}


def _to_theirs(model: ModelConfig, conv: Tensor) -> list[Tensor]:
    dk = model.delta.linear_key_head_dim
    parts = conv.split((dk, dk, model.delta.mixed - 2 * dk), 1)
    return [torch.cat([part.flatten(0, 1) for part in parts])[:, None]]


def _to_ours(model: ModelConfig, parts: Sequence[Tensor]) -> Tensor:
    given = model.delta
    size = given.linear_num_key_heads * given.linear_key_head_dim
    rows = parts[0][:, 0].split((size, size, given.value_size))
    return torch.cat([part.unflatten(0, (given.linear_num_key_heads, -1)) for part in rows], 1)


NEXT_RULES = (
    *QWEN_RULES,
    LayerRule("layers.{i}.attention.conv", (LINEAR + "conv1d.weight",), TensorForm(_to_theirs, _to_ours)),
    *Renamed({"attention.dt_bias": "dt_bias", "attention.a_log": "A_log", "attention.norm": "norm"}, LINEAR),
    *Renamed({"attention.qkvz": "in_proj_qkvz", "attention.ba": "in_proj_ba", "attention.out": "out_proj"}, LINEAR),
    *Renamed({"mlp.shared_gate": "shared_expert_gate"}, QWEN_BLOCK),
    *Renamed({"mlp.shared_experts.fc1": ("gate_proj", "up_proj")}, QWEN_BLOCK + "shared_expert.", STACKED),
    *Renamed({"mlp.shared_experts.fc2": "shared_expert.down_proj"}, QWEN_BLOCK),
)


SIZES = {
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
"""What each is where a file does not say it."""


def read_mixed(fields: Fields, read: Callable[[Fields], ModelConfig]) -> ModelConfig:
    """A model with DeltaNet in some layers. read: what it has of a family without. Raises ConfigError."""
    step = fields.integer("full_attention_interval", 4)
    linear = fields.of_layers("layer_types", KINDS, lambda index: (index + 1) % step > 0)
    width = fields.integer("head_dim", 256)
    model = read(fields.but(layer_types=None, partial_rotary_factor=None, head_dim=width))
    sizes = {name: fields.integer(name, usual) for name, usual in SIZES.items()}
    pattern = None if all(linear) else pattern_text(linear)
    given = Delta(experimental_attention_variant="gdn", linear_attention_freq=pattern, **sizes)
    return dataclasses.replace(
        model,
        delta=given if any(linear) else Delta(),
        rotary_percent=read_rotary_share(fields, 0.25),
        apply_layernorm_1p=True,
        attention_output_gate=True,
        experts=model.experts if model.experts.num_experts is None else _beside(model.experts, fields),
    )


def _beside(experts: Experts, fields: Fields) -> Experts:
    """With the one that all tokens take."""
    width = fields.integer("shared_expert_intermediate_size", 512)
    return dataclasses.replace(experts, moe_shared_expert_intermediate_size=width, moe_shared_expert_gate=True)


def write_mixed(model: ModelConfig, written: Mapping[str, Any]) -> dict[str, Any]:
    """written: the entries of a family without DeltaNet."""
    given, some = model.delta, model.delta.experimental_attention_variant is not None
    full, linear, width = *KINDS, model.experts.moe_shared_expert_intermediate_size
    layers = [some and model.listed("linear_attention_freq", index) for index in range(model.num_layers)]
    left_out = ("use_sliding_window", "sliding_window", "max_window_layers")
    return {
        **{name: value for name, value in with_rotary_share(model, written).items() if name not in left_out},
        "layer_types": [linear if layer else full for layer in layers],
        **({} if width is None else {"shared_expert_intermediate_size": width}),
        **{name: getattr(given, name) for name in SIZES},
    }


def _read(fields: Fields) -> ModelConfig:
    return read_mixed(fields, read_qwen3_moe)


def _write(model: ModelConfig) -> dict[str, Any]:
    return write_mixed(model, write_qwen3_moe(model))


QWEN3_NEXT = HuggingFaceFamily("qwen3_next", "Qwen3NextForCausalLM", NEXT_RULES, _read, _write, True)
