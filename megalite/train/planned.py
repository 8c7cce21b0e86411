"""A run before anything large is made: what its start and `--dry-run` say and check.

What a module of the user's own needs: its states to the byte, its activations as autograd keeps them. These are
measured on tensors without values: a stage's layers run once, and what they save for the backward is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from megalite.config import Config
from megalite.inventory import MemoryPlan, stage_layer_ranges
from megalite.library import Boundary, Parts, Ranges, TracedLayer, without_values
from megalite.planner import (
    PlannedStages,
    RankMemory,
    StageActivations,
    StateBytes,
    as_built,
    foreign_memory,
    named_state_bytes,
    pipeline_memory,
)
from megalite.schedule import Program
from megalite.train.foreign import ForeignModel


@dataclass(frozen=True)
class PlannedRun(PlannedStages):
    """foreign: the module of `--model-module`, if it is one."""

    foreign: ForeignModel | None = None

    @classmethod
    def before(
        cls, config: Config, size: int, program: Program, plan: MemoryPlan, foreign: ForeignModel | None, on_cpu: bool
    ) -> PlannedRun:
        cuts = stage_layer_ranges(config, program) if foreign is None else foreign.cuts
        return cls(config, size, program, cuts, plan, on_cpu, foreign)

    @cached_property
    def memory(self) -> Sequence[RankMemory]:
        """Of the ranks at each pipeline coordinate. Asked before the stages are built."""
        return pipeline_memory(self) if self.foreign is None else memory_of(self, self.foreign)


def memory_of(run: PlannedRun, foreign: ForeignModel) -> list[RankMemory]:
    """Bytes that a module of the user's own needs."""
    config, program = run.config, run.program
    last = len(foreign.cuts) - 1
    measured = {stage: stage_activations(foreign, stage, last=stage == last) for stage in range(last + 1)}
    specs = [layer.boundary.message for layer in foreign.parts.found]
    message = max((math.prod(spec.shape) * spec.dtype.itemsize for spec in specs[:-1]), default=0)
    wide = torch.promote_types(torch.float32, specs[-1].dtype).itemsize
    found = []
    for rank in range(program.num_ranks):
        stages, states = [stage for stage, _ in program.placement.stages_of(rank)], StateBytes()
        for stage in stages:
            states += named_state_bytes(
                config,
                run.world_size,
                foreign.held[stage],
                plan=run.plan,
                whole=foreign.parts.names.updated_whole(config.optimizer.optimizer),
                tied=foreign.parts.tied,
                versions=program.weight_versions[rank],
                num_gradients=program.gradient_buffers,
                on_cpu=run.on_cpu,
            )
        states = as_built(run, rank, states)
        own = {stage: measured[stage][0] for stage in stages}
        logits = 2 * math.prod(specs[-1].shape) * wide if last in own else 0
        logits = max(logits, *(measured[stage][1] for stage in stages))
        found.append(foreign_memory(run, rank, states, own, message=message, logits=logits))
    return found


def stage_activations(foreign: ForeignModel, stage: int, *, last: bool) -> tuple[StageActivations, int]:
    """Bytes that one micro-batch leaves for its backward, and those that come and go where layers are recomputed."""
    parts, items = foreign.parts, foreign.cuts[stage]
    arrives = parts.found[items.start - 1].boundary if items.start else parts.given
    body, again, out = saved_bytes(parts, items, arrives, foreign.ranges(stage))
    head = 0
    if last:
        head = out.numel() * torch.promote_types(torch.float32, out.dtype).itemsize  # log-probabilities
    entry = math.prod(arrives.message.shape) * arrives.message.dtype.itemsize if items.start else 0
    found = StageActivations(full=body, boundary=entry, head=head, weight_only=body / 2, weight_only_block=0.0)
    return found, again


def saved_bytes(parts: Parts, items: range, arrives: Boundary, ranges: Ranges) -> tuple[int, int, Tensor]:
    """(Bytes that the layers `items` save beside their weights and their input, the most that some of them save when
    they are recomputed, the first of what leaves)."""
    device = parts.device if parts.device.type == "cuda" else torch.device("cpu")  # which decides how attention runs
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        inputs = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in parts.given.specs)
        x: Any = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in arrives.specs)
        # A tensor that is written into may be no leaf.
        x = tuple(value.requires_grad_().clone() if value.is_floating_point() else value for value in x)
        kept = {value.untyped_storage()._cdata: value.untyped_storage() for value in (*x, *inputs)}
        states, most = [], 0
        for layer in (parts.layers[index] for index in items):
            tensors = [*layer.named_parameters(), *layer.named_buffers()]
            state = {name: without_values(tensor, device) for name, tensor in tensors}
            kept |= {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in state.values()}
            states.append(state)
        weights = len(kept)

        for begin, end, again in ranges:
            if again:
                kept |= {value.untyped_storage()._cdata: value.untyped_storage() for value in x}
            noted = dict(kept)
            with saved_tensors_hooks(partial(_note, noted), lambda tensor: tensor):
                for index, state in zip(items[begin:end], states[begin:end], strict=True):
                    layer = parts.layers[index]
                    more = {"inputs": inputs} if isinstance(layer, TracedLayer) else {}
                    x = functional_call(layer, state, x, more)
                    x = x if isinstance(x, tuple) else (x,)
            if again:
                most = max(most, _bytes(list(noted.values())[len(kept) :]))
            else:
                kept = noted
    return _bytes(list(kept.values())[weights:]), most, x[0]


def _note(kept: dict[int, torch.UntypedStorage], tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    kept.setdefault(storage._cdata, storage)
    return tensor


def _bytes(storages: Iterable[torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)
