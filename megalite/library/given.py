"""What a user gives a `Pipeline`, and what is wrong with it."""

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from megalite.comm import Axis, all_gather_json
from megalite.errors import ConfigError, ScheduleError, spelled
from megalite.library.traced_layer import BODY
from megalite.schedule import SCHEDULES, find_schedule

OPERATIONS, PARAMETERS = "operations", "parameters"
FINE = 1e9
"""What all weights add up to: they are cut as whole operations."""
TAKEN = "of_a_pipeline"
"""An attribute of layers and parameters that a pipeline has."""
ARGUMENTS = {
    "pipeline_schedule_file": "program",
    "pipeline_schedule": "schedule",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "chunks",
    "num_layers": "layers",
    "num_distributed_optimizer_instances": "dp_replicate",
    "global_batch_size": "the number of micro-batches",
}
"""Settings of rooms below -> what a Python program calls them."""


def listed(layers: Any) -> Sequence[nn.Module]:
    """The layers as a list of modules. Raises ConfigError for anything else."""
    if isinstance(layers, nn.Module) and not isinstance(layers, nn.Sequential | nn.ModuleList):
        raise ConfigError(
            f"layers: one {type(layers).__name__}; cut it by megalite.layers_from_module(module, example)"
        )
    if callable(layers) and not isinstance(layers, nn.Module) or not hasattr(layers, "__iter__"):
        raise ConfigError(f"layers: {type(layers).__name__}; a list of modules is wanted: call what makes it")
    given = list(layers)
    for index, layer in enumerate(given):
        if not isinstance(layer, nn.Module):
            raise ConfigError(f"layers[{index}]: {type(layer).__name__}; an nn.Module is wanted")
    if not given:
        raise ConfigError("layers: there is none")
    return given


def check_schedule(name: str) -> None:
    """Raises ScheduleError for one that does not exist."""
    try:
        find_schedule(name)
    except ScheduleError:
        near = get_close_matches(str(name).lower(), SCHEDULES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ScheduleError(f"schedule={name!r}: no such schedule{hint}; one of {', '.join(SCHEDULES)}") from None


def weighed(balance: str | Sequence[float], count: int, world: Axis) -> str | list[float]:
    """What the layers weigh, the same on all ranks. Collective where these are numbers. Raises ConfigError."""
    if isinstance(balance, str):
        if balance in (OPERATIONS, PARAMETERS):
            return balance
        raise ConfigError(f"balance={balance!r}: {OPERATIONS!r}, {PARAMETERS!r}, or a number for each layer")
    numbers = [float(number) for number in balance]
    if len(numbers) != count or not all(0 <= number < math.inf for number in numbers) or not sum(numbers):
        raise ConfigError(f"balance: {len(numbers)} numbers; one from 0 on for each of the {count} layers is wanted")
    largest = [max(each) for each in zip(*all_gather_json(numbers, world), strict=True)]
    return [number / sum(largest) * FINE for number in largest]


def check_memory(layers: int | None, method: str, offloaded: int) -> None:
    """Raises ConfigError. layers, method: of recomputation. offloaded: layers whose activations wait on the host."""
    if method not in ("uniform", "block"):
        raise ConfigError(f"recompute_method={method!r}: 'uniform' or 'block'")
    if layers is not None and layers < 1:
        raise ConfigError(f"recompute_num_layers={layers}: a number above 0 is wanted; None recomputes nothing")
    if offloaded < 0 or offloaded and layers is not None:
        raise ConfigError(f"cpu_offloading_num_layers={offloaded}: 0 or more, and not with recompute_num_layers")


def check_free(layers: Sequence[nn.Module]) -> None:
    """Raises ConfigError where another pipeline has these layers: it has changed how their gradients are computed."""
    for index, layer in enumerate(layers):
        if any(hasattr(part, TAKEN) for part in [layer, *layer.parameters()]):
            raise ConfigError(f"layers[{index}]: another pipeline has it; make the layers again for this one")


def check_values(layers: Sequence[nn.Module]) -> None:
    """Raises ConfigError where a parameter or buffer is on `meta`."""
    for index, layer in enumerate(layers):
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            if tensor.is_meta:
                raise ConfigError(
                    f"layers[{index}]: {name.removeprefix(BODY)} is on meta, without values; build the modules on a "
                    "device (the example may be on meta)"
                )


def take(layers: Sequence[nn.Module]) -> None:
    """Marks layers and parameters as those of a pipeline, for `check_free`."""
    for layer in layers:
        for part in [layer, *layer.parameters()]:
            setattr(part, TAKEN, True)


def in_arguments(text: str) -> str:
    """A message of rooms below, with every setting by the name of its argument."""
    return spelled(text, lambda name: ARGUMENTS.get(name, name))
