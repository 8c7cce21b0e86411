"""Rotary position embedding (RoFormer, arXiv 2104.09864), half-rotated as GPT-NeoX, Megatron and Hugging Face store it.

Channel i of the first half of the rotated channels is paired with channel i of the second half and turned by
`position * base ** (-2i / rotary_dim)`; channels behind `rotary_dim` stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.config.model import ModelConfig

Rotation = tuple[Tensor, Tensor]


class Rotary:
    """Angles of a micro-batch, computed once and shared by the blocks of a stage."""

    def __init__(self, config: ModelConfig) -> None:
        self.dim, self.base = config.rotary_dim, config.rotary_base
        self._positions: Tensor | None = None
        self._rotation: Rotation | None = None

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions int64 `[b, s]` -> (cos, sin), each `[s, b, 1, 1, rotary_dim / 2]` in `dtype`."""
        if torch.compiler.is_compiling():
            return self.compute(positions, dtype)
        if self._rotation is None or self._positions is not positions or self._rotation[0].dtype != dtype:
            self._positions, self._rotation = positions, self.compute(positions, dtype)
        return self._rotation

    def compute(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """As `__call__`, always anew. Angles are fp32 (fp64 where `dtype` is): bf16 could not tell far positions
        apart.
        """
        exact = torch.promote_types(dtype, torch.float32)
        exponents = torch.arange(0, self.dim, 2, device=positions.device, dtype=exact) / self.dim
        angles = positions.t()[:, :, None, None, None].to(exact) * self.base**-exponents
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turns the first channels of x, `[s, b, g, r, d]` (groups of r heads)."""
    cos, sin = rotation
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned if x.shape[-1] == 2 * half else (*turned, x[..., 2 * half :]), -1)
