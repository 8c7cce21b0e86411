"""Measured times of layers (tools/profile_layers.py) instead of a roofline.

A profile is JSON: `points` with the tensor-parallel size, the micro-batch, and seconds of F, I, W (and what B hides) of
an embedding, a block and a head of the model that was measured; `optimizer_seconds_per_element`. A layout whose point
is missing takes the nearest one, scaled by what the roofline says of the difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.config import Config
from megalite.errors import ConfigError
from megalite.planner.cost import LayerTimes, Roofline, Times
from megalite.planner.hardware import Hardware

__all__ = ["Profile", "load_profile"]

KINDS = ("embedding", "block", "head")


@dataclass(frozen=True)
class Profile:
    """points: (tensor-parallel size, micro-batch) -> times."""

    roofline: Roofline
    points: Mapping[tuple[int, int], LayerTimes]
    optimizer_seconds_per_element: float

    def layers(self, config: Config) -> LayerTimes:
        tp, micro = config.parallel.tensor_model_parallel_size, config.training.micro_batch_size
        if (tp, micro) in self.points:
            return self.points[tp, micro]
        nearest = min(self.points, key=lambda key: (abs(key[0] - tp), abs(key[1] - micro)))
        parallel = replace(config.parallel, tensor_model_parallel_size=nearest[0])
        there = self.roofline.layers(
            replace(config, parallel=parallel, training=replace(config.training, micro_batch_size=nearest[1]))
        )
        here, measured = self.roofline.layers(config), self.points[nearest]
        scaled = {kind: _scaled(getattr(measured, kind), getattr(here, kind), getattr(there, kind)) for kind in KINDS}
        return LayerTimes(**scaled)

    def optimizer_step(self, config: Config, elements: float) -> float:
        return elements * self.optimizer_seconds_per_element


def _scaled(measured: Times, here: Times, there: Times) -> Times:
    return Times(*(m * (h / t if t else 1.0) for m, h, t in zip(measured, here, there, strict=True)))


def load_profile(path: str, hardware: Hardware) -> Profile:
    """Read a profile. Raises ConfigError where it is not one."""
    try:
        data: Any = json.loads(Path(path).read_text())
        points = {
            (int(point["tensor_model_parallel_size"]), int(point["micro_batch_size"])): LayerTimes(
                **{kind: Times(*(float(value) for value in point[kind])) for kind in KINDS}
            )
            for point in data["points"]
        }
        step = float(data["optimizer_seconds_per_element"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--profile={path}: not a profile of tools/profile_layers.py ({error!r})") from error
    if not points:
        raise ConfigError(f"--profile={path}: holds no measured point")
    return Profile(Roofline(hardware), points, step)
