"""Any list of modules as a pipeline: stages, messages and programs of `megalite.schedule`, without a configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalite.comm import Channel, ParallelMesh, TensorSpec, all_reduce_
from megalite.config import ParallelConfig
from megalite.errors import ConfigError, ScheduleError
from megalite.gradient import WeightGradQueue
from megalite.library.cutting import check_shared, crossings, cut
from megalite.library.modules import LossFunction, Sample, StageModule, count_calls, split_backwards
from megalite.parallel.pipeline import Events, Executor, Stage
from megalite.schedule import (
    SCHEDULES,
    Action,
    BatchRange,
    Program,
    StageKey,
    build_program,
    find_schedule,
    lower,
    merge_backward,
    validate,
)


class WeightEvents(Protocol):
    """Who owns the weights of a pipeline: `ShardedOptimizer`."""

    def begin_batch(self) -> None:
        """Gradients of the batch before are done with."""

    def before_backward(self, stage: StageKey, *, last: bool) -> None:
        """A micro-batch's gradient is about to be added."""

    def execute(self, action: Action) -> None:
        """REDUCE, NORM or STEP of a stage, or a gather of its weights."""


class Pipeline:
    """Modules, one after the other, over the pipeline ranks of a mesh.

    layers: modules that take and return one tensor; all ranks give the same list, with the same values, and each keeps
        those of its stages.
    loss: (what the last layer returns, target) -> 0-dim, the mean over the micro-batch.
    example: a micro-batch's input, for its shape and dtype, which all micro-batches have; it may be on `meta`.
    schedule: a name of `megalite.SCHEDULES` that drains after every batch, or a program of your own (`parse_program`),
        which fixes the number of micro-batches; None: 1F1B.
    mesh: the grid of ranks; tensor- and context-parallel sizes are 1. None: one process.
    chunks: stages of each rank, where the schedule leaves the choice (interleaved).
    sizes: number of layers of each stage; None: cut by the layers' operations, so that the slowest stage is fastest.
    device: where to compute; None: the current GPU if there is one, else the CPU.

    Raises ConfigError for what does not go together.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        loss: LossFunction,
        example: Tensor,
        schedule: str | Program | None = None,
        mesh: ParallelMesh | None = None,
        chunks: int | None = None,
        sizes: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.mesh = mesh or ParallelMesh.single()
        self.schedule, self.chunks = schedule or ParallelConfig().schedule, chunks
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self._check()
        self._programs: dict[int, Program] = {}
        self._batches = self._microbatches = 0
        own = schedule.num_microbatches if isinstance(schedule, Program) else 2 * self.mesh.size("pp")
        program = self.program(own)
        self.placement = program.placement
        self._calls: Counter[int] = Counter()
        counting = count_calls(layers, self._calls)
        found = crossings(layers, example, self.device)
        for handle in counting:
            handle.remove()
        self.cuts = cut(self.placement, [crossing.flops for crossing in found], sizes)
        check_shared(layers, self.cuts)
        self._given = TensorSpec(tuple(example.shape), example.dtype, self.device)
        specs = [self._given, *(crossing.spec for crossing in found)]
        keys = self.placement.stages_of(self.mesh.coordinate("pp"))
        self.stages = {key: self._stage(key, layers, loss, specs) for key in keys}
        down, up = (self.mesh.over("pp", apart=direction) for direction in ("down", "up"))
        channel = Channel(down, up, self.placement.neighbours)
        self._events = _Events(self)
        self._executor = Executor(self.mesh.coordinate("pp"), self.stages, self.placement, channel, self._events)
        self.optimizer: WeightEvents | None = None

    def _check(self) -> None:
        if isinstance(self.schedule, Program):
            if self.schedule.num_ranks != self.mesh.size("pp"):
                raise ConfigError(
                    f"schedule {self.schedule.name!r}: a program of {self.schedule.num_ranks} ranks, the mesh has "
                    f"pp={self.mesh.size('pp')}"
                )
        elif find_schedule(self.schedule).asynchronous:
            names = ", ".join(name for name, schedule in SCHEDULES.items() if not schedule.asynchronous)
            raise ConfigError(
                f"schedule={self.schedule!r}: it never drains, and a step of the library ends with its batch; "
                f"pretrain_gpt.py runs it; here use one of {names}"
            )
        for axis in ("tp", "cp"):
            if self.mesh.size(axis) > 1:
                raise ConfigError(f"mesh: {axis}={self.mesh.size(axis)}: modules of your own are not cut; make it 1")

    def _check_inputs(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> None:
        if not micro_batches:
            raise ConfigError("micro_batches: there is none")
        shape, dtype = self._given.shape, self._given.dtype
        for index, (inputs, _) in enumerate(micro_batches):
            if tuple(inputs.shape) != shape or inputs.dtype != dtype:
                raise ConfigError(
                    f"micro_batches[{index}]: its input is {tuple(inputs.shape)} of {inputs.dtype}, the example was "
                    f"{shape} of {dtype}; all must be like it"
                )

    def _stage(
        self, key: StageKey, layers: Sequence[nn.Module], loss: LossFunction, specs: Sequence[TensorSpec]
    ) -> Stage:
        items, queue = self.cuts[key[0]], WeightGradQueue()
        is_last = key[0] == self.placement.num_stages - 1
        module = StageModule(
            [layers[index] for index in items], loss if is_last else None, specs[items.stop], items.start
        )
        module.to(self.device)
        split_backwards(module, queue, self.device, self._calls)
        arrives, leaves = specs[items.start], specs[items.stop]
        return Stage([module], queue, spec=arrives, out_spec=leaves, is_first=key[0] == 0, is_last=is_last)

    def program(self, microbatches: int) -> Program:
        """The validated program of a batch of so many micro-batches a replica. Raises ScheduleError."""
        if microbatches not in self._programs:
            own = self.schedule
            if isinstance(own, str):
                own = build_program(own, self.mesh.size("pp"), microbatches, self.chunks)
            if own.num_microbatches != microbatches:
                raise ScheduleError(
                    f"{own.name}: its batch has {own.num_microbatches} micro-batches, not {microbatches}"
                )
            program = lower(merge_backward(own))
            validate(program)
            self._programs[microbatches] = program
        return self._programs[microbatches]

    @torch.enable_grad()
    def step(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> Tensor:
        """Forward and backward of a batch: (input, target) of each micro-batch of this replica, the same list on all of
        its pipeline ranks (inputs are read on the first stage, targets on the last).

        Returns the loss, the mean over all micro-batches of all replicas, 0-dim and the same on every rank. Gradients
        go to the `ShardedOptimizer`, or where there is none to `.grad`. Raises ScheduleError for a
        number of micro-batches that the schedule does not take.
        """
        if self.optimizer is None and self.mesh.size("dp") > 1:
            raise ConfigError(f"mesh: dp={self.mesh.size('dp')}: make a ShardedOptimizer, which sums the gradients")
        self._check_inputs(micro_batches)
        program = self.program(len(micro_batches))
        if self.optimizer is not None:
            self.optimizer.begin_batch()
        batch = BatchRange(self._batches, self._microbatches, len(micro_batches), 0, first=True)
        share = 1.0 / (len(micro_batches) * self.mesh.size("dp"))
        source = _Samples(micro_batches, self._microbatches, share, self.device)
        for action in self._executor.run(program.actions_for_batch(self.mesh.coordinate("pp"), batch), source):
            if self.optimizer is not None:
                self.optimizer.execute(action)
        self._executor.finish()
        self._batches, self._microbatches = self._batches + 1, batch.end
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in self._executor.take_losses().values():
            total += loss * share
        all_reduce_(total, self.mesh.world)
        return total


class _Samples:
    """A batch for the executor."""

    def __init__(self, given: Sequence[tuple[Tensor, Any]], first: int, share: float, device: torch.device) -> None:
        self._given, self._first, self._device = given, first, device
        self._share = torch.tensor(share, dtype=torch.float64, device=device)

    def get(self, microbatch: int) -> tuple[Sample, Tensor]:
        inputs, target = self._given[microbatch - self._first]
        moved = target.to(self._device) if isinstance(target, Tensor) else target
        return Sample(inputs.to(self._device), moved), self._share


class _Events(Events):
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def before_backward(self, stage: StageKey, microbatch: int, *, last: bool) -> None:
        if self._pipeline.optimizer is not None:
            self._pipeline.optimizer.before_backward(stage, last=last)
