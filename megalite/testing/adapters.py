"""Adapters as their definition says it, in plain torch: y = x W^T + bias, and to some rows of it scale * x A^T B^T.

No gradient by hand, no view of interleaved rows: the row numbers of each part are written out.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.nn.adapters import Bottleneck, Prefix
from megalite.nn.attention.layer import Attention
from megalite.parallel.tensor import ColumnParallelLinear, RowParallelLinear


def replace_adapters(model: nn.Module, config: ModelConfig) -> None:
    """In all linear layers of a model of one process that has adapters."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and config.lora.lora_rank is not None:
            module.__dict__["forward"] = _forward(module, config)  # in its place
            if config.lora.frozen_weights_int8:
                module.weight.data = in_eight_bits(module.weight.data)
        elif isinstance(module, Bottleneck):
            module.__dict__["forward"] = _plain_bottleneck(module)
        elif isinstance(module, Attention) and module.adapters is not None:
            module.__dict__["attend"] = _plain_prefix(module, module.adapters)


def _plain_bottleneck(module: Bottleneck) -> Callable[[Tensor], Tensor]:
    def forward(y: Tensor) -> Tensor:
        low = y @ module.down.weight.t() + module.down.bias
        low = low * (1 + torch.erf(low / 2**0.5)) / 2
        return y + low @ module.up.weight.t() + module.up.bias

    return forward


def _plain_prefix(layer: Attention, own: Prefix) -> Callable[..., Tensor]:
    """Attention of one sample after the other, its scores written out; no document begins inside of one."""

    def attend(qkv: Tensor, microbatch: Any, cache: object = None) -> Tensor:
        s, b, d, r = *qkv.shape[:2], layer.d, layer.r
        # with a gate, the rows of each query head are followed by those of its gate
        rows, prefix, made = qkv.view(s, b, -1, (2 * r if layer.gated else r) + 2, d), own.prefix, []
        queries, keys = rows[:, :, :, : -2 : 2 if layer.gated else 1], rows[:, :, :, -2:-1]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = layer.q_norm(queries), layer.k_norm(keys)
        length = prefix.shape[1]
        sees = torch.ones(s, length + s, dtype=torch.bool).tril(length)
        for sample in range(b):
            heads = []
            for head in range(rows.shape[2] * r):
                group, at = head // r, head % r
                q, k, v = queries[:, sample, group, at], keys[:, sample, group, 0], rows[:, sample, group, -1]
                if layer.rotary is not None:
                    cos, sin = (x[:, 0, 0, 0] for x in layer.rotary(microbatch.positions, q.dtype))
                    q, k = (_turned(x, cos, sin) for x in (q, k))
                q = q if layer.query_multiplier is None else q * layer.query_multiplier
                k, v = (torch.cat((x[:, group * d : group * d + d], y)) for x, y in zip(prefix, (k, v), strict=True))
                scores, cap = q @ k.t() / d**0.5, layer.core.softcap
                scores = scores if cap is None else cap * torch.tanh(scores / cap)
                scores = scores.masked_fill(~sees, -torch.inf)
                sink = None if (sinks := layer.sinks(qkv)) is None else sinks[head].expand(s, 1)
                weights = (scores if sink is None else torch.cat((scores, sink), 1)).softmax(-1)[:, : length + s]
                y = weights @ v
                heads.append(y * torch.sigmoid(rows[:, sample, group, 2 * at + 1]) if layer.gated else y)
            made.append(torch.cat(heads, -1))
        return torch.stack(made, 1)

    return attend


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of channels half a head apart are turned."""
    n = cos.shape[-1]
    first, second, rest = x[:, :n], x[:, n : 2 * n], x[:, 2 * n :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


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
