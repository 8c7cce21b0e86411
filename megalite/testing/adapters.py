"""Adapters as their definition says it, in plain torch: y = x W^T + bias, and to some rows of it scale * x A^T B^T.

No gradient by hand, no view of interleaved rows: the row numbers of each part are written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.parallel.tensor import ColumnParallelLinear, RowParallelLinear


def replace_adapters(model: nn.Module, config: ModelConfig) -> None:
    """In all linear layers of a model of one process that has adapters."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and config.lora.lora_rank is not None:
            module.__dict__["forward"] = _forward(module, config)  # in its place
            if config.lora.frozen_weights_int8:
                module.weight.data = in_eight_bits(module.weight.data)


def _forward(module: Any, config: ModelConfig) -> Callable[..., Tensor]:
    def forward(x: Tensor, message: object = None) -> Tensor:  # one process sends none
        x = module.activation(x) if getattr(module, "activation", None) is not None else x
        bias = None if module.bias is None else module.bias.flatten()
        y = F.linear(x, module.weight.flatten(0, -2), bias)
        for name, adapter in () if module.adapters is None else module.adapters.named_children():
            low = F.linear(F.linear(x, adapter.lora_a), adapter.lora_b.flatten(0, -2))
            placed = y.new_zeros(y.shape)
            placed[..., rows_of(name, y.shape[-1], config)] = low
            y = y + (config.lora.lora_alpha or config.lora.lora_rank or 1) / (config.lora.lora_rank or 1) * placed
        return y

    return forward


def in_eight_bits(weight: Tensor) -> Tensor:
    """Each row by itself: whole numbers from -127 to 127 times its largest over 127."""
    rows = [
        row * 0 if not row.any() else torch.round(row / (row.abs().max() / 127)) * (row.abs().max() / 127)
        for row in weight.flatten(0, -2)
    ]
    return torch.stack(rows).view(weight.shape)


def rows_of(part: str, outputs: int, config: ModelConfig) -> Tensor:
    """The outputs that a part is, in the order of its own rows: of head after head, gate before value."""
    d, groups, heads = config.head_dim, config.query_groups, config.num_attention_heads
    share = heads // groups
    rows = list(range(outputs))
    if part in ("gate", "up"):
        rows = rows[: outputs // 2] if part == "gate" else rows[outputs // 2 :]
    elif part in ("q", "k", "v"):
        firsts = {
            "q": [((head // share) * (share + 2) + head % share) * d for head in range(heads)],
            "k": [(group * (share + 2) + share) * d for group in range(groups)],
            "v": [(group * (share + 2) + share + 1) * d for group in range(groups)],
        }
        rows = [first + i for first in firsts[part] for i in range(d)]
    return torch.tensor(rows)
