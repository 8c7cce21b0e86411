"""Rotary position embedding (RoFormer, arXiv 2104.09864), half-rotated as GPT-NeoX, Megatron and Hugging Face store it.

Channel i of the first half of the rotated channels is paired with channel i of the second half and turned by
`position * base ** (-2i / rotary_dim)`; channels behind `rotary_dim` stay as they are.

For sequences longer than those of its first training, a model may divide all positions (linear interpolation, arXiv
2306.15595) or lower only its low frequencies (Llama 3.1, arXiv 2407.21783; YaRN, arXiv 2309.00071).
"""

import math

import torch
from torch import Tensor

from megalite.config import ModelConfig, RopeScaling

Rotation = tuple[Tensor, Tensor]

# Waves that turn fewer than 1 time in the length of the first training are slowed down fully, those that turn more than
# 4 times not at all.
LLAMA3_SLOW_TURNS, LLAMA3_FAST_TURNS = 1.0, 4.0


class Rotary:
    """Angles of a micro-batch, computed once and shared by the blocks of a stage."""

    def __init__(self, config: ModelConfig) -> None:
        self.dim, self.base = config.rotary_dim, config.rotary_base
        self.scaling, self.begin = config.rope_scaling, config.lora.prefix
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
        """Computes the rotation. Angles are fp32 (fp64 where `dtype` is): bf16 could not tell far positions apart."""
        exact = torch.promote_types(dtype, torch.float32)
        exponents = torch.arange(0, self.dim, 2, device=positions.device, dtype=exact) / self.dim
        frequencies = self.base**-exponents
        temperature, given = 1.0, self.scaling
        if given.kind == "llama3":
            frequencies = slow_down(frequencies, given.rope_scaling_factor, given.rope_scaling_original_length)
        elif given.kind == "yarn":
            frequencies = slow_down_by_channel(frequencies, given, self.base)
            temperature = given.yarn_temperature  # of queries and keys alike: 1 / t of the paper for both
        factor = given.rotary_seq_len_interpolation_factor
        positions = positions + self.begin if self.begin else positions
        angles = positions.t()[:, :, None, None, None].to(exact) / factor * frequencies
        return (angles.cos() * temperature).to(dtype), (angles.sin() * temperature).to(dtype)


def slow_down(frequencies: Tensor, factor: float, length: int = 8192) -> Tensor:
    """Llama 3.1: the low frequencies are divided by `factor`, the high ones kept, those between blended.

    length: of the sequences that the model was trained on first.
    """
    turns = length / (2 * math.pi) * frequencies
    kept = ((turns - LLAMA3_SLOW_TURNS) / (LLAMA3_FAST_TURNS - LLAMA3_SLOW_TURNS)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def slow_down_by_channel(frequencies: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    """YaRN: as `slow_down`, blended evenly over the channels between two numbers of turns in the first length."""
    channels, length = len(frequencies), scaling.rope_scaling_original_length

    def channel_of(turns: float) -> float:
        return channels * math.log(length / (turns * 2 * math.pi)) / math.log(base)

    low, high = channel_of(scaling.yarn_beta_fast), channel_of(scaling.yarn_beta_slow)
    if scaling.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0.0, low), min(2.0 * channels - 1, high)
    ramp = torch.arange(channels, dtype=frequencies.dtype, device=frequencies.device) - low
    slowed = (ramp / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - slowed + slowed / scaling.rope_scaling_factor)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turns the first channels of x, `[s, b, g, r, d]` (groups of r heads)."""
    cos, sin = rotation
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned if x.shape[-1] == 2 * half else (*turned, x[..., 2 * half :]), -1)
