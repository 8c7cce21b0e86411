"""Which of somebody's layers a stage holds, and what crosses between stages.

Shapes and costs come from one pass over meta tensors: nothing is computed, no parameter is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from megalite.comm import TensorSpec
from megalite.errors import ConfigError
from megalite.schedule import StagePlacement, partition


@dataclass(frozen=True)
class Crossing:
    """What leaves a layer, and the floating-point operations of its forward."""

    spec: TensorSpec
    flops: float


def crossings(layers: Sequence[nn.Module], example: Tensor, device: torch.device) -> list[Crossing]:
    """Of every layer, for an input like `example`. Raises ConfigError for a layer that does not return one tensor of
    floating-point numbers, or that needs the values of its input to say what shape it returns."""
    x, found = torch.empty_like(example, device="meta"), []
    for index, layer in enumerate(layers):
        kind = f"layers[{index}] ({type(layer).__name__})"
        tensors = chain(layer.named_parameters(), layer.named_buffers())
        state = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
        counter = FlopCounterMode(display=False)
        try:
            with torch.no_grad(), counter:
                out = functional_call(layer, state, (x,))
        except Exception as error:  # whatever somebody's module raises
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(f"{kind}: no shape without values for an input of {tuple(x.shape)}: {reason}") from None
        if not isinstance(out, Tensor) or not out.is_floating_point():
            what = f"a tensor of {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
            raise ConfigError(f"{kind}: returns {what}; a layer of a pipeline takes and returns one floating tensor")
        found.append(Crossing(TensorSpec(tuple(out.shape), out.dtype, device), float(counter.get_total_flops())))
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
    found = partition(number - 2, placement, costs=[max(weight, 1.0) for weight in weights])
    return [found.items(stage) for stage in range(stages)]


def check_shared(layers: Sequence[nn.Module], cuts: Sequence[range]) -> None:
    """Raises ConfigError for a parameter that layers of two stages share."""
    where: dict[int, tuple[int, int]] = {}
    for stage, items in enumerate(cuts):
        for index in items:
            for name, parameter in layers[index].named_parameters():
                first = where.setdefault(id(parameter), (stage, index))
                if first[0] != stage:
                    raise ConfigError(
                        f"layers[{index}].{name}: layers[{first[1]}] has the same parameter on another stage; cut the "
                        "layers so that one stage has both (sizes=...)"
                    )


def named(layers: Iterable[nn.Module], first: int) -> Iterator[tuple[str, nn.Parameter]]:
    """(Name, parameter) of a stage's layers, each once: `3.weight` is that of layers[3]. first: number of the first."""
    seen: set[int] = set()
    for index, layer in enumerate(layers, first):
        for name, parameter in layer.named_parameters():
            if id(parameter) not in seen and parameter.requires_grad:
                seen.add(id(parameter))
                yield f"{index}.{name}", parameter
