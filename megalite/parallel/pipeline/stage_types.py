"""Stages that recompute, and which stage of a program is of what type.

The forward of a `RecomputedStage` keeps its input alone; the action R runs the forward again ahead of the backward:

    F    layers, for the output alone       input, micro-batch and version are kept
    R    the same layers once more          autograd's graph; the input goes into it
    B    as in every other stage

Both runs record a graph, so that both take the same kernels and give the same bits; the first one's saved tensors are
dropped as they come. Dropout is keyed, so the masks are the same too; a module of a user's own, which draws from
torch's generators, says by `repeat` how it is run again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalite.microbatch import StageInput
from megalite.parallel.pipeline.offloaded_stage import OffloadedStage
from megalite.parallel.pipeline.stage import Stage
from megalite.parallel.tiers import Mover, SavedTensors
from megalite.schedule import Program, StageKey


@runtime_checkable
class Repeatable(Protocol):
    """A module with a forward that is not the same when it runs again."""

    def repeat(self) -> AbstractContextManager[None]:
        """Called before a forward; within the context the same forward runs again."""


def repeated(buffers: Iterable[Tensor], device: torch.device) -> AbstractContextManager[None]:
    """A context with torch's generators as they are now. After it, generators and buffers are as they were before it:
    statistics of a batch count once."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return _repeated(list(buffers), device, torch.get_rng_state(), on_device)


@contextmanager
def _repeated(buffers: list[Tensor], device: torch.device, state: Tensor, on_device: Tensor | None) -> Iterator[None]:
    kept = [buffer.clone() for buffer in buffers]
    with torch.random.fork_rng([] if on_device is None else [device]):
        torch.set_rng_state(state)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        try:
            yield
        finally:
            for buffer, values in zip(buffers, kept, strict=True):
                buffer.data.copy_(values)  # unseen by autograd: a backward may still need the buffer


class RecomputedStage(Stage):
    """A `Stage` of `Program.recomputed`; takes the same arguments."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._inputs: dict[int, tuple[Tensor | None, StageInput, Tensor, int, AbstractContextManager[None]]] = {}

    def forward(self, number: int, x: Tensor | None, microbatch: StageInput, factor: Tensor, *, version: int) -> Tensor:
        """Runs the layers and keeps their input alone."""
        module = self.module(version)
        again = module.repeat() if isinstance(module, Repeatable) else nullcontext()
        with saved_tensors_hooks(_drop, _missing):
            out = super().forward(number, x, microbatch, factor, version=version)
        del self._in_flight[number]
        self._inputs[number] = x, microbatch, factor, version, again
        return out

    def recompute(self, number: int) -> None:
        """The forward again, from here on as if it had just run."""
        x, microbatch, factor, version, again = self._inputs.pop(number)
        with again:
            super().forward(number, x, microbatch, factor, version=version)

    @property
    def num_in_flight(self) -> int:
        return super().num_in_flight + len(self._inputs)


def _drop(tensor: Tensor) -> None:
    """Drops what autograd saves of the first run."""


def _missing(saved: None) -> NoReturn:
    raise RuntimeError("a stage that recomputes has no backward before its R")


def stage_type(program: Program, key: StageKey, beside: Sequence[Stage], mover: Mover) -> Callable[..., Stage]:
    """Chooses the class of a stage of a program. beside: the rank's stages so far, whose memory it shares."""
    if key[0] in program.recomputed:
        return RecomputedStage
    if program.room is None:
        return Stage
    others = [stage.saved for stage in beside if isinstance(stage, OffloadedStage)]
    return partial(OffloadedStage, saved=others[0] if others else SavedTensors(mover))
