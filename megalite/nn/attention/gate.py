"""A gate of every channel of attention's result (Qwen3-Next), whose rows follow those of their query head."""

from __future__ import annotations

import torch
from torch import Tensor


def ungated(qkv: Tensor, r: int, d: int) -> tuple[Tensor, Tensor]:
    """(Queries, keys, values; the gates) of groups of r query heads of d channels each."""
    groups = qkv.view(*qkv.shape[:2], -1, 2 * r + 2, d)
    pairs, rest = groups.split((2 * r, 2), 3)
    queries, gates = pairs.unflatten(3, (r, 2)).unbind(4)
    return torch.cat((queries, rest), 3).flatten(2), gates.flatten(2)
