"""Clipping by the exact global norm: one scalar, agreed on by all ranks because the norm is."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """`min(1, max_norm / (norm + 1e-6))`, 0-dim, on the norm's device (no synchronisation); 1 where max_norm is 0 (no
    clipping).

    norm: global L2 norm of the gradients, already divided by the loss scale.
    """
    if max_norm <= 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1.0e-6)).clamp(max=1.0)
