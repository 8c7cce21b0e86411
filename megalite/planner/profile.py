"""Measured times of layers (tools/profile_layers.py) instead of a roofline.

A profile is JSON: `points` with the tensor-parallel size, sequence parallelism, the micro-batch, and seconds of F, I, W
(and what B hides) of an embedding, a block and a head of the model that was measured, messages of tensor parallelism
included; `model`, what those times depend on: another is refused; `optimizer` (seconds of an update and per owned
element), `step` (seconds besides the actions, and per sample of a rank), `links` (operation -> latency, bytes per
second inside a node). A layout whose point is missing takes the nearest one, scaled by what the roofline says of the
difference; so does one that shares sequences.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megalite.config import Config, effective, show
from megalite.errors import ConfigError
from megalite.inventory import model_layers
from megalite.planner.cost import LayerTimes, Roofline
from megalite.planner.hardware import Hardware, Link

KINDS = ("embedding", "block", "head")
PRECISION = "precision"
ANYTHING = ("num_layers", "model_type", "max_position_embeddings")  # what the time of a block does not depend on


@dataclass(frozen=True, kw_only=True)
class Profile(Roofline):
    """Measured times. points: (tensor-parallel size, sequence parallel, micro-batch) -> kind of layer -> times."""

    points: Mapping[tuple[int, bool, int], Mapping[str, LayerTimes]]
    optimizer: tuple[float, float]  # (fixed, per unit)
    step: tuple[float, float]
    measured: Mapping[str, Any] = field(default_factory=dict)  # `measured_model` of what was timed
    path: str = ""  # where it was read

    def check(self, config: Config) -> None:
        """Raises ConfigError where another model is planned than was timed: times are of one width."""
        now = measured_model(config)
        other = [name for name, value in self.measured.items() if name in now and now[name] != value]
        if other:
            named = {name: name if name == PRECISION else f"`{name}`" for name in other[:4]}
            shown = ", ".join(
                f"{text}={show(self.measured[name])} (here {show(now[name])})" for name, text in named.items()
            )
            raise ConfigError(
                f"`profile`={self.path}: its times are of a model with {shown}; measure this one: "
                "tools/profile_layers.py with the flags of this plan"
            )

    def layers(self, config: Config) -> Sequence[LayerTimes]:
        tp, micro = config.parallel.tensor_model_parallel_size, config.training.micro_batch_size
        split = tp > 1 and config.parallel.sequence_parallel
        kinds = [layer.kind for layer in model_layers(config.model)]
        whole = config.parallel.context.context_parallel_size == 1  # as everything in a profile is
        if whole and (tp, split, micro) in self.points:
            return [self.points[tp, split, micro][kind] for kind in kinds]
        nearest = min(self.points, key=lambda key: (abs(key[0] - tp), key[1] != split, abs(key[2] - micro)))
        parallel = replace(
            config.parallel,
            tensor_model_parallel_size=nearest[0],
            sequence_parallel=nearest[1],
            context=replace(config.parallel.context, context_parallel_size=1),
        )
        there = super().layers(
            replace(config, parallel=parallel, training=replace(config.training, micro_batch_size=nearest[2]))
        )
        measured, here = self.points[nearest], super().layers(config)
        return [_scaled(measured[kind], h, t) for kind, h, t in zip(kinds, here, there, strict=True)]

    def optimizer_step(self, config: Config, elements: float) -> float:
        return self.optimizer[0] + elements * self.optimizer[1]

    def step_overhead(self, samples: float) -> float:
        return self.step[0] + samples * self.step[1]


def measured_model(config: Config) -> dict[str, int | str | None]:
    """What the times of a model's layers depend on, depth and layout apart, as a profile notes it."""
    model = {**effective(config.model), "seq_length": config.model.seq_length}
    plain = {
        name: value for name, value in model.items() if isinstance(value, int | str | None) and name not in ANYTHING
    }
    float8 = config.training.float8
    how = {"compile": config.training.compile, "fp8_format": float8.fp8_format, "fp8_recipe": float8.fp8_recipe}
    return {**plain, PRECISION: config.training.precision.name, **how}


def _scaled(measured: LayerTimes, here: LayerTimes, there: LayerTimes) -> LayerTimes:
    return LayerTimes(*(m * (h / t if t else 1.0) for m, h, t in zip(measured, here, there, strict=True)))


def load_profile(path: str, hardware: Hardware) -> Profile:
    """Read a profile. Raises ConfigError where it is not one."""
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        points = {
            (
                int(point["tensor_model_parallel_size"]),
                bool(point["sequence_parallel"]),
                int(point["micro_batch_size"]),
            ): {kind: LayerTimes(*(float(value) for value in point[kind])) for kind in KINDS}
            for point in data["points"]
        }
        update, step = (_pair(data[name]) for name in ("optimizer", "step"))
        links = {name: Link(*reversed(_pair(pair))) for name, pair in data["links"].items()}
    except FileNotFoundError:
        raise ConfigError(f"`profile`={path}: no such file; tools/profile_layers.py writes one") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"`profile`={path}: not a profile of tools/profile_layers.py ({error!r})") from error
    if not points:
        raise ConfigError(f"`profile`={path}: holds no measured point")
    if not isinstance(data.get("model"), dict):
        raise ConfigError(f"`profile`={path}: does not say which model was timed; measure it again")
    known = replace(hardware, measured=links)
    return Profile(known, points=points, optimizer=update, step=step, measured=data["model"], path=path)


def _pair(numbers: Any) -> tuple[float, float]:
    first, second = numbers
    return float(first), float(second)


def mean_profile(profiles: Sequence[Any]) -> Any:
    """The numbers of several profiles of one machine, averaged: its speed drifts."""
    first = profiles[0]
    if isinstance(first, dict):
        return {name: mean_profile([profile[name] for profile in profiles]) for name in first}
    if isinstance(first, list):
        return [mean_profile(list(values)) for values in zip(*profiles, strict=True)]
    return sum(profiles) / len(profiles) if isinstance(first, float) else first
