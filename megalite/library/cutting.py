"""Which of somebody's layers a stage holds, and what crosses between stages.

Shapes and costs come from one pass over meta tensors: nothing is computed, no parameter is copied.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from megalite.comm import TensorSpec
from megalite.errors import ConfigError
from megalite.library.traced_layer import TracedLayer
from megalite.microbatch import Microbatch
from megalite.schedule import StagePlacement, partition

Tensors = tuple[Tensor, ...]
Ranges = Sequence[tuple[int, int, bool]]
"""(Begin, end, recompute) of the layers of a stage."""


@dataclass(frozen=True)
class Boundary:
    """The tensors between two layers. Several travel as one message, one after the other."""

    specs: tuple[TensorSpec, ...]

    @property
    def message(self) -> TensorSpec:
        """What a stage sends."""
        first = self.specs[0]
        if len(self.specs) == 1:
            return first
        return TensorSpec((sum(math.prod(spec.shape) for spec in self.specs),), first.dtype, first.device)

    def pack(self, values: Tensors) -> Tensor:
        """The message of these values."""
        return values[0] if len(values) == 1 else torch.cat([value.reshape(-1) for value in values])

    def unpack(self, message: Tensor) -> Tensors:
        """The values of a message."""
        if len(self.specs) == 1:
            return (message,)
        sizes = [math.prod(spec.shape) for spec in self.specs]
        return tuple(part.view(spec.shape) for part, spec in zip(message.split(sizes), self.specs, strict=True))

    def fits(self, values: Tensors) -> bool:
        """Whether these values have the shapes and the dtype."""
        return [(tuple(v.shape), v.dtype) for v in values] == [(spec.shape, spec.dtype) for spec in self.specs]

    def __str__(self) -> str:
        return " and ".join(f"{spec.shape} of {spec.dtype}" for spec in self.specs)


@dataclass(frozen=True)
class Crossing:
    """What leaves a layer, the floating-point operations of its forward and its parameters.

    writes: it writes into its input.
    """

    boundary: Boundary
    flops: float
    parameters: int
    writes: bool


def call(layer: nn.Module, x: Tensors, inputs: Tensors, microbatch: Microbatch | None = None) -> Tensors:
    """What the layer makes of what arrives; a traced one may read the micro-batch's inputs, too."""
    traced = isinstance(layer, TracedLayer)
    out = layer(*x, inputs=inputs, microbatch=microbatch) if traced else layer(*x)
    return out if isinstance(out, tuple) else (out,)


def crossings(layers: Sequence[nn.Module], example: Tensors, device: torch.device) -> list[Crossing]:
    """Of every layer, for an input like `example`. Raises ConfigError for a layer that does not return one tensor of
    floating-point numbers or a tuple of some, or that needs the values of its input to say what shape it returns."""
    inputs = tuple(torch.empty_like(tensor, device="meta") for tensor in example)
    x, found = inputs, []
    for index, layer in enumerate(layers):
        kind = f"layers[{index}] ({type(layer).__name__})"
        tensors = chain(layer.named_parameters(), layer.named_buffers())
        state = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
        more: dict[str, Any] = {"inputs": inputs} if isinstance(layer, TracedLayer) else {}
        counter, versions = FlopCounterMode(display=False), [tensor._version for tensor in x]
        try:
            with torch.no_grad(), counter:
                made = functional_call(layer, state, x, more)
        except Exception as error:  # whatever somebody's module raises
            reason = str(error).strip().split("\n")[0]
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in x)
            raise ConfigError(f"{kind}: no shape without values for an input of {shapes}: {reason}") from None
        out = made if isinstance(made, tuple) else (made,)
        if not out or not all(isinstance(value, Tensor) and value.is_floating_point() for value in out):
            what = f"a tensor of {made.dtype}" if isinstance(made, Tensor) else type(made).__name__
            raise ConfigError(
                f"{kind}: returns {what}; a layer takes and returns one floating tensor, or a tuple of some"
            )
        if len({value.dtype for value in out}) > 1:
            raise ConfigError(f"{kind}: returns tensors of several dtypes; between layers all must have one")
        boundary = Boundary(tuple(TensorSpec(tuple(value.shape), value.dtype, device) for value in out))
        numel = sum(parameter.numel() for parameter in layer.parameters())
        writes = [tensor._version for tensor in x] != versions
        found.append(Crossing(boundary, float(counter.get_total_flops()), numel, writes))
        x = out
    return found


def cut(placement: StagePlacement, costs: Sequence[float], sizes: Sequence[int] | None) -> list[range]:
    """The layers of each stage, by the costs of all: so that the slowest is as fast as possible, or as many of each as
    `sizes` says. Raises ConfigError."""
    number, stages = len(costs), placement.num_stages
    if sizes is not None:
        if len(sizes) != stages or sum(sizes) != number or min(sizes) < 1:
            raise ConfigError(f"sizes={list(sizes)}: {stages} numbers above 0 with the sum {number} are wanted")
        ends = list(accumulate(sizes))
        return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if number < stages:
        raise ConfigError(
            f"{number} layers: {stages} stages ({placement.num_ranks} pipeline ranks) hold one each at least; give "
            "more layers, or fewer ranks"
        )
    if stages == 1:
        return [range(number)]
    weights = costs if sum(costs) > 0 else [1.0] * number
    return partition(number - 2, placement, costs=[max(weight, 1.0) for weight in weights])
