"""How long each of somebody's layers takes, and what watches a step: a profiler's spans, a timeline in a file."""

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from megalite.errors import ConfigError
from megalite.library.cutting import Tensors, call
from megalite.library.given import check_free, check_values, listed
from megalite.library.traced_layer import together
from megalite.parallel.pipeline import Executor, PipelineTracer
from megalite.schedule import BatchRange, Program

Made = TypeVar("Made")


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer with one micro-batch. backward: of its input's and its parameters' gradients."""

    name: str
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.forward + self.backward


def time_layers(
    layers: Sequence[nn.Module],
    example: Tensor | Tensors,
    *,
    repeats: int = 5,
    device: torch.device | str | None = None,
) -> list[LayerTime]:
    """The median times of each layer, measured one after the other in this process, before a `Pipeline` has them.

    example: a micro-batch's input, as in `Pipeline`; on `meta` numbers are drawn for it, and whole numbers are 0.
    repeats: measurements of each, after one that does not count. device: None: the current GPU, else the CPU.

    A copy of each layer is measured: parameters, gradients, buffers and torch's generator stay as they are.
    Raises ConfigError.
    """
    layers = listed(layers)
    check_free(layers)
    check_values(layers)
    if repeats < 1:
        raise ConfigError(f"repeats={repeats}: a number above 0 is wanted")
    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    found = []
    with torch.random.fork_rng(), torch.enable_grad():
        x = inputs = tuple(_filled(tensor, place) for tensor in together(example))
        for index, layer in enumerate(layers):
            times: list[tuple[float, float]] = []
            own = copy.deepcopy(layer).to(place)
            for _ in range(repeats + 1):
                forward, backward, out = _once(own, x, inputs, place, first=index == 0)
                times.append((forward, backward))
            forward, backward = (statistics.median(values) for values in zip(*times[1:], strict=True))
            found.append(LayerTime(f"layers[{index}] {type(layer).__name__}", forward, backward))
            x = out
    return found


def _filled(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_meta:
        return tensor.to(device)
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, device=device).to(tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


def _once(
    layer: nn.Module, x: Tensors, inputs: Tensors, device: torch.device, *, first: bool
) -> tuple[float, float, Tensors]:
    """(Seconds of forward, of backward, what comes out)."""
    leaves = [value.detach().requires_grad_(value.is_floating_point() and not first) for value in x]
    given = tuple(leaf.clone() for leaf in leaves)  # a layer may write into it
    forward, out = _clocked(lambda: call(layer, given, inputs), device)
    wanted = [tensor for tensor in (*leaves, *layer.parameters()) if tensor.requires_grad]
    learns = [value for value in out if value.requires_grad]
    arriving = [torch.ones_like(value) for value in learns]
    backward = 0.0
    if learns and wanted:
        backward, _ = _clocked(lambda: torch.autograd.grad(learns, wanted, arriving, allow_unused=True), device)
    return forward, backward, tuple(value.detach() for value in out)


def _clocked(work: Callable[[], Made], device: torch.device) -> tuple[float, Made]:
    wait = clock_of(device) or (lambda: None)
    wait()
    begin = time.perf_counter()
    made = work()
    wait()
    return time.perf_counter() - begin, made


def clock_of(device: torch.device) -> Callable[[], None] | None:
    """What a device has to do before a clock is read."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else None


@contextmanager
def watched(executor: Executor, tracer: PipelineTracer | None, program: Program, batch: BatchRange) -> Iterator[None]:
    """Around a batch: its actions are spans of the profiler that runs, if one does; a tracer writes its timeline."""
    executor.mark = torch.profiler.record_function if torch.autograd._profiler_enabled() else None
    if tracer is not None:
        tracer.before(1, program, batch)
    yield
    if tracer is not None:
        tracer.after(1, program)
