"""Whether the ranks of a replica read the same samples: inputs of one rank's list with the targets of another's, which
the first and the last stage would take, train in silence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megalite.library.cutting import Tensors

VALUES = 32
Seen = list[list[float] | None]
"""Of each tensor some values, or nothing where it is a placeholder."""


@torch.no_grad()
def seen(inputs: Sequence[Tensors]) -> Seen:
    """Values spread over the inputs of the first and of the last micro-batch. What is constant or on `meta` may
    stand in where no stage reads it; complex, sparse and nested tensors are passed over."""
    found: Seen = []
    for tensor in (*inputs[0], *inputs[-1]):
        if tensor.is_meta or tensor.is_complex() or tensor.layout != torch.strided or tensor.is_nested:
            found.append(None)
            continue
        flat = tensor.reshape(-1)
        values = flat[:: max(1, flat.numel() // VALUES)][:VALUES].double().tolist()
        found.append(values if len(set(values)) > 1 else None)
    return found


def other_inputs(told: Sequence[tuple[int, Seen]]) -> str | None:
    """What is wrong, by (replica, what it has seen) of every rank: two ranks of one replica with different inputs.
    Values may differ by a hundredth of the largest: devices round."""
    first: dict[tuple[int, int], tuple[int, list[float]]] = {}
    for rank, (replica, tensors) in enumerate(told):
        for place, values in enumerate(tensors):
            if values is None:
                continue
            before, known = first.setdefault((replica, place), (rank, values))
            if not _close(known, values):
                return (
                    f"micro_batches: ranks {before} and {rank}, both of replica {replica}, give different inputs; all "
                    'ranks of a replica give the same list: seed data by mesh.coordinate("dp"), not by world.rank'
                )
    return None


def _close(one: list[float], other: list[float]) -> bool:
    slack = 0.01 * max((abs(x) for x in [*one, *other] if math.isfinite(x)), default=0.0)
    near = (a == b or not abs(a - b) > slack for a, b in zip(one, other, strict=False))  # nan is near everything
    return len(one) == len(other) and all(near)
