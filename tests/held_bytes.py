"""Bytes that a rank holds for its parameters and their gradients, by the storages that their objects keep."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from megalite.parallel.zero import ParameterBuffers
from megalite.parallel.zero.host_gradient import HostedGradient, HostedStream


def held_bytes(family: ParameterBuffers) -> dict[str, int]:
    """Of weights and gradients on the device, without scratch."""
    weights = [value for each in family.weights.coming for value in vars(each).values()]
    gradients: list[object] = []
    for gradient in (gradient for bucket in family.buckets for gradient in bucket.gradients):
        if isinstance(gradient, HostedGradient):
            gradients.append(gradient._vectors)
        elif not isinstance(gradient, HostedStream):
            gradients += vars(gradient).values()
    return {"weights": bytes_of(weights), "gradients": bytes_of(gradients)}


def bytes_of(values: Iterable[object]) -> int:
    """Of the storages of the tensors among them, each counted once."""
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
