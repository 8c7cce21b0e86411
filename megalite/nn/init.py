"""Initial values as a function of (seed, logical name) alone, so that every layout starts from the same weights.

The normal deviates of a logical tensor are drawn in blocks of whole rows, each block by a CPU generator of its own in
fp32; a rank draws only the blocks that its rectangle touches, cuts its part out and casts it.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from megalite.nn.naming import named_logical_parameters, placement_of

# Elements of a block, about: part of what defines the values, so it can never change.
BLOCK_ELEMENTS = 1 << 20


@torch.no_grad()
def initialize(module: nn.Module, *, prefix: str = "", seed: int) -> None:
    """Fills all parameters in place: normal weights, constant norms and biases, zero padding rows."""
    for name, parameter in named_logical_parameters(module, prefix):
        place = placement_of(parameter)
        if place.init_std is None:
            parameter.fill_(place.init_value)
            continue
        parameter.zero_()
        valid = place.valid_shape(tuple(parameter.shape))
        if all(valid):
            target = parameter[tuple(slice(extent) for extent in valid)]
            target.copy_(logical_normal(name, place.global_shape, place.offset, valid, std=place.init_std, seed=seed))


def logical_normal(
    name: str, global_shape: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], *, std: float, seed: int
) -> Tensor:
    """The rectangle `offset .. offset + shape` of the logical tensor `name`, fp32 on the CPU."""
    *outer, rows, columns = global_shape
    if not outer:
        return _rectangle(name, rows, columns, offset, shape, std=std, seed=seed)
    (parts,) = outer  # stacked projections: one matrix after the other
    return torch.stack(
        [
            _rectangle(name, parts * rows, columns, (part * rows + offset[1], offset[2]), shape[1:], std=std, seed=seed)
            for part in range(offset[0], offset[0] + shape[0])
        ]
    )


def _rectangle(
    name: str,
    rows: int,
    columns: int,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    *,
    std: float,
    seed: int,
) -> Tensor:
    height = max(1, BLOCK_ELEMENTS // columns)
    begin, end = offset[0], offset[0] + shape[0]
    pieces = []
    for block in range(begin // height, math.ceil(end / height)):
        top = block * height
        values = torch.empty(min(height, rows - top), columns).normal_(
            0.0, std, generator=_generator(seed, name, block)
        )
        pieces.append(values[max(begin - top, 0) : end - top, offset[1] : offset[1] + shape[1]])
    return torch.cat(pieces)


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
