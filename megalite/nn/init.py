"""Logical names of parameters, and their initial values: a function of (seed, name) alone, so that every layout starts
from the same weights.

The normal deviates of a logical tensor are drawn in blocks of whole rows, each block by a CPU generator of its own in
fp32; a rank draws only the blocks that its rectangle touches, cuts its part out and casts it.
"""

import hashlib
import itertools
import math

import torch
from torch import Tensor, nn

from megalite.inventory import placement_of

# Elements of a block, approximately. It is part of the definition of the values, so it can never change.
BLOCK_ELEMENTS = 1 << 20


def logical_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(Logical name, parameter) of every parameter once, in the order of definition.

    The name is the path inside the module, or the parameter's own `logical_name` where it has one (the word embedding,
    and the copy of it that a tied head on another stage holds).
    """
    return [(getattr(parameter, "logical_name", path), parameter) for path, parameter in module.named_parameters()]


def initialize(module: nn.Module, *, seed: int) -> None:
    """Fills all parameters in place."""
    for name, parameter in logical_parameters(module):
        fill(name, parameter, seed=seed)


@torch.no_grad()
def fill(name: str, parameter: nn.Parameter, *, seed: int) -> None:
    """Initial values of one parameter: normal weights, constant norms and biases, zero padding rows."""
    assert hasattr(parameter, "placement"), f"{name}: every parameter of a layer is made by new_parameter"
    place = placement_of(parameter)
    if place.init_std is None:
        parameter.fill_(place.init_value)
        return
    parameter.zero_()
    valid = place.valid_shape(tuple(parameter.shape))
    if all(valid):
        target = parameter[tuple(slice(extent) for extent in valid)]
        logical_normal(name, place.global_shape, place.offset, std=place.init_std, seed=seed, out=target)


def logical_normal(
    name: str, global_shape: tuple[int, ...], offset: tuple[int, ...], *, std: float, seed: int, out: Tensor
) -> None:
    """out = the rectangle `offset .. offset + out.shape` of the logical tensor `name`, rounded from fp32."""
    *outer, rows, columns = global_shape
    parts = math.prod(outer)  # stacked projections, stacked experts: one matrix after the other
    height = max(1, BLOCK_ELEMENTS // columns)
    for index in itertools.product(*map(range, out.shape[:-2])):
        part, target = 0, out[index]
        for extent, begin, place in zip(outer, offset, index, strict=False):
            part = part * extent + begin + place
        begin = part * rows + offset[-2]
        end = begin + target.shape[0]
        for block in range(begin // height, math.ceil(end / height)):
            top = block * height
            digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
            values = torch.empty(min(height, parts * rows - top), columns).normal_(0.0, std, generator=generator)
            piece = values[max(begin - top, 0) : end - top, offset[-1] : offset[-1] + target.shape[1]]
            at = max(top - begin, 0)
            target[at : at + len(piece)].copy_(piece)
