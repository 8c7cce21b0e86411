"""Published weights in 8 and 4 bits, read as bf16.

    mxfp4   X_blocks uint8 [E, out, in / 32, 16], X_scales uint8 [E, out, in / 32]: 32 numbers share a power of two
            (OCP Microscaling 1.0), two of them in a byte, the lower half first. X is `[E, in, out]`
    fp8     X.weight e4m3 [out, in], X.weight_scale_inv fp32 [out / 128, in / 128]: a factor of each block (DeepSeek-V3,
            arXiv 2412.19437, 3.3)

What a folder says of itself (`quantization_config`) decides which is looked for.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.errors import ConfigError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCKS, SCALES, FACTORS = "_blocks", "_scales", ".weight_scale_inv"


@dataclass(frozen=True)
class Quantized:
    """One tensor."""

    parts: tuple[str, ...]  # names of what is stored of it
    dtypes: tuple[str, ...]  # theirs, in safetensors' words
    decode: Callable[..., Tensor]  # parts -> the tensor in bf16; raises ValueError where they do not fit together


def quantized_tensors(settings: Mapping[str, Any], names: Collection[str], where: str) -> dict[str, Quantized]:
    """Full name -> how it is stored, of those that are not stored as they are. names: all that is stored. Raises
    ConfigError for a method that we do not have."""
    method = settings.get("quant_method")
    if method == "mxfp4":
        whole = [name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS)]
        return {name: Quantized((name + BLOCKS, name + SCALES), ("U8", "U8"), from_mxfp4) for name in whole}
    sides = settings.get("weight_block_size")
    if method == "fp8" and isinstance(sides, list) and len(sides) == 2 and all(type(s) is int and s > 0 for s in sides):
        found = [name.removesuffix(FACTORS) for name in names if name.endswith(FACTORS)]
        kinds, decode = ("F8_E4M3", "F32"), partial(from_blocks, sides=(sides[0], sides[1]))
        return {f"{n}.weight": Quantized((f"{n}.weight", n + FACTORS), kinds, decode) for n in found}
    what = str(method)[:40] if method else "quantised"
    raise ConfigError(
        f"{where}: quantization_config: {what} weights are not supported (only mxfp4, and fp8 with "
        "weight_block_size); take the full model"
    )


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """`[E, out, g, 16]` and `[E, out, g]` -> `[E, 32 g, out]` in bf16."""
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16 or blocks.ndim != 4:
        raise ValueError(f"blocks {list(blocks.shape)} do not go with scales {list(scales.shape)}")
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.bfloat16)
    found = torch.empty(blocks.shape[0], 2 * blocks.shape[2] * 16, blocks.shape[1], dtype=torch.bfloat16)
    for expert, (block, scale) in enumerate(zip(blocks, scales, strict=True)):  # one by one: 16 times as much memory
        pairs = torch.stack((values[(block & 15).int()], values[(block >> 4).int()]), -1).flatten(2)
        found[expert] = torch.ldexp(pairs.float(), scale.int()[..., None] - 127).to(torch.bfloat16).flatten(1).t()
    return found


def from_blocks(weight: Tensor, factors: Tensor, sides: tuple[int, int]) -> Tensor:
    """`[out, in]` in e4m3 times the factor of its block, `[ceil(out / sides[0]), ceil(in / sides[1])]` -> bf16."""
    if factors.shape != tuple(-(-n // side) for n, side in zip(weight.shape, sides, strict=True)):
        raise ValueError(f"weight {list(weight.shape)} in blocks of {list(sides)} has no {list(factors.shape)} factors")
    whole = factors.repeat_interleave(sides[0], 0)[: weight.shape[0]]
    whole = whole.repeat_interleave(sides[1], 1)[:, : weight.shape[1]]
    return (weight.float() * whole).to(torch.bfloat16)
