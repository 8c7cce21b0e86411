"""Seconds of the messages of a grid of tensor-parallel ranks."""

from __future__ import annotations

from megalite.config import Config
from megalite.inventory import ElementBytes, Layer, grid_exchanges, micro_tokens
from megalite.planner.communication import CommGroup
from megalite.planner.hardware import Hardware


def grid_seconds(config: Config, layer: Layer, hardware: Hardware) -> tuple[float, float]:
    """Of a layer and a micro-batch in (forward, backward), each in the open."""
    assert config.parallel.grid is not None
    size, forward, backward = ElementBytes.of(config), 0.0, 0.0
    for each in grid_exchanges(layer, config.parallel.grid, micro_tokens(config)):
        nbytes = each.numel * (size.wide if each.wide else size.compute)
        seconds = CommGroup(hardware, each.ranks, each.stride).gather(nbytes)
        forward += each.forward * seconds
        backward += each.backward * seconds
    return forward, backward
