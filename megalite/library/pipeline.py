"""Any list of modules as a pipeline: stages, messages and programs of `megalite.schedule`, without a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalite.comm import Channel, ParallelMesh, all_gather_json, all_reduce_
from megalite.config import ParallelConfig
from megalite.errors import ConfigError, RuntimeFailure, ScheduleError
from megalite.library.agreement import other_inputs, seen
from megalite.library.cutting import Tensors
from megalite.library.modules import LossFunction, Sample
from megalite.library.parts import OPERATIONS, PARAMETERS, Parts
from megalite.library.traced_layer import BODY, together
from megalite.library.words import in_words
from megalite.parallel.pipeline import Events, Executor, ForwardOnly, SharedGradient
from megalite.schedule import (
    SCHEDULES,
    Action,
    BatchRange,
    Program,
    StageKey,
    build_program,
    find_schedule,
    forward_program,
    lower,
    merge_backward,
    validate,
)

TAKEN = "of_a_pipeline"
"""An attribute of layers and parameters that a pipeline has."""


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

    layers: modules that take and return one tensor, or a tuple (its tensors are the arguments of the next layer); all
        ranks give the same list, with the same values, and each keeps those of its stages. `layers_from_module` makes
        them of one module.
    loss: (what the last layer returns, target) -> 0-dim, the mean over the micro-batch.
    example: a micro-batch's input, one tensor or a tuple, for its shape and dtype, which all micro-batches have; it may
        be on `meta`.
    schedule: a name of `megalite.SCHEDULES` that drains after every batch, or a program of your own (`parse_program`),
        which fixes the number of micro-batches; None: 1F1B.
    mesh: the grid of ranks; the context-parallel size is 1, the tensor-parallel one that of `layers_from_module`. None:
        one process.
    chunks: stages of each rank, where the schedule leaves the choice (interleaved).
    sizes: number of layers of each stage; None: cut so that the fullest stage is as light as possible.
    balance: what a layer weighs: its 'operations' (the slowest stage is as fast as possible) or its 'parameters'.
    device: where to compute; None: the current GPU if there is one, else the CPU.

    Raises ConfigError for what does not go together.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        loss: LossFunction,
        example: Tensor | Tensors,
        schedule: str | Program | None = None,
        mesh: ParallelMesh | None = None,
        chunks: int | None = None,
        sizes: Sequence[int] | None = None,
        balance: str = OPERATIONS,
        device: torch.device | str | None = None,
    ) -> None:
        self.mesh = mesh or ParallelMesh.single()
        self.schedule, self.chunks = schedule or ParallelConfig().schedule, chunks
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        layers, given = _listed(layers), together(example)
        _check_free(layers)
        self._check(layers, balance)
        self._programs: dict[int, Program] = {}
        self._batches = self._microbatches = 0
        own = schedule.num_microbatches if isinstance(schedule, Program) else 2 * self.mesh.size("pp")
        program = self.program(own)
        self.placement = program.placement
        self.parts = Parts(layers, given, self.placement, self.device, balance=balance, sizes=sizes)
        self.cuts, self.names, self.tied = self.parts.cuts, self.parts.names, self.parts.tied
        _check_values(layers)
        keys = self.placement.stages_of(self.mesh.coordinate("pp"))
        self.stages = {key: self.parts.stage(key, loss, program)[0] for key in keys}
        self.parts.layers.clear()  # those of other ranks' stages go with the user's references
        down, up = (self.mesh.over("pp", apart=direction) for direction in ("down", "up"))
        self._channel = Channel(down, up, self.placement.neighbours)
        self._broken, self._compared = "", False
        self.shared = SharedGradient(self.mesh.through(self.parts.holders, apart="tied"))
        self._executor = Executor(self.mesh.coordinate("pp"), self.stages, self.placement, self._channel, _Events(self))
        self.optimizer: WeightEvents | None = None
        _take(layers)

    def _check(self, layers: Sequence[nn.Module], balance: str) -> None:
        if balance not in (OPERATIONS, PARAMETERS):
            raise ConfigError(f"balance={balance!r}: {OPERATIONS!r} or {PARAMETERS!r}")
        if isinstance(self.schedule, Program):
            if self.schedule.num_ranks != self.mesh.size("pp"):
                raise ConfigError(
                    f"schedule {self.schedule.name!r}: a program of {self.schedule.num_ranks} ranks, the mesh has "
                    f"pp={self.mesh.size('pp')}"
                )
            if why := _unfit(self.schedule.asynchronous, bool(self.schedule.recomputed)):
                fix = "leave R out" if self.schedule.recomputed else "give one that drains"
                raise ConfigError(f"schedule {self.schedule.name!r}: {why}; {fix}")
        else:
            _check_schedule(self.schedule)
        if self.mesh.size("cp") > 1:
            raise ConfigError(f"mesh: cp={self.mesh.size('cp')}: sequences of your own are not cut; make it 1")
        tp = self.mesh.size("tp")
        if tp > 1 and {getattr(layer, "ranks", 1) for layer in layers} != {tp}:
            raise ConfigError(
                f"mesh: tp={tp}: modules of your own are not cut; make it 1, or give layers_from_module this mesh and "
                "tensor_parallel"
            )

    def _check_inputs(self, micro_batches: Sequence[tuple[Any, Any]]) -> None:
        if not micro_batches:
            raise ConfigError("micro_batches: there is none")
        for index, pair in enumerate(micro_batches):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ConfigError(f"micro_batches[{index}]: {type(pair).__name__}; (input, target) is wanted")
            given = together(pair[0])
            if not self.parts.given.fits(given):
                found = " and ".join(f"{tuple(x.shape)} of {x.dtype}" for x in given)
                raise ConfigError(
                    f"micro_batches[{index}]: its input is {found}, the example was {self.parts.given}; all must "
                    "be like it"
                )

    def layers(self, key: StageKey) -> list[tuple[int, nn.Module]]:
        """(Number, layer) of a stage of this rank."""
        module: Any = self.stages[key].modules[0]
        return list(enumerate(module.layers, module.first))

    def parameters(self, key: StageKey) -> list[tuple[str, nn.Parameter]]:
        """(Name, parameter) of what learns in a stage of this rank: `Parts.parameters`."""
        module: Any = self.stages[key].modules[0]
        return self.parts.parameters(module)

    def program(self, microbatches: int) -> Program:
        """The validated program of a batch of so many micro-batches a replica. Raises ScheduleError."""
        if microbatches not in self._programs:
            try:
                self._programs[microbatches] = self._proved(microbatches)
            except ScheduleError as error:
                raise ScheduleError(in_words(str(error))) from None
        return self._programs[microbatches]

    def _proved(self, microbatches: int) -> Program:
        own = self.schedule
        if isinstance(own, str):
            own = build_program(own, self.mesh.size("pp"), microbatches, self.chunks)
        if own.num_microbatches != microbatches:
            raise ScheduleError(f"{own.name}: its batch has {own.num_microbatches} micro-batches, not {microbatches}")
        program = lower(merge_backward(own))
        validate(program)
        return program

    @torch.enable_grad()
    def step(self, micro_batches: Sequence[tuple[Any, Any]]) -> Tensor:
        """Forward and backward of a batch: (input, target) of each micro-batch of this replica, the same list on all of
        its pipeline ranks (inputs are read on the first stage, targets on the last).

        Returns the loss, the mean over all micro-batches of all replicas, 0-dim and the same on every rank. Gradients
        go to the `ShardedOptimizer`, or where there is none to `.grad`. Raises ScheduleError for a
        number of micro-batches that the schedule does not take.
        """
        if self.optimizer is None and self.mesh.size("dp") > 1:
            raise ConfigError(f"mesh: dp={self.mesh.size('dp')}: make a ShardedOptimizer, which sums the gradients")
        micro_batches = self._agree(micro_batches)
        program = self.program(len(micro_batches))
        if self.optimizer is not None:
            self.optimizer.begin_batch()
        batch = BatchRange(self._batches, self._microbatches, len(micro_batches), 0, first=True)
        source = _Samples(micro_batches, self._microbatches, self._share(micro_batches), self.device)
        with self._whole():
            for action in self._executor.run(program.actions_for_batch(self.mesh.coordinate("pp"), batch), source):
                if self.optimizer is not None:
                    self.optimizer.execute(action)
            self._executor.finish()
            if self.optimizer is None:
                self._sum_tied()
            self._batches, self._microbatches = self._batches + 1, batch.end
            return self._mean(self._executor, micro_batches)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[tuple[Any, Any]]) -> Tensor:
        """The loss of a batch as `step` returns it, by forwards alone, with the layers in evaluation mode."""
        micro_batches = self._agree(micro_batches)
        program = forward_program(self.placement, len(micro_batches))
        stages = {key: ForwardOnly(stage, 0) for key, stage in self.stages.items() if key[1] == 0}
        rank, modules = self.mesh.coordinate("pp"), [stage.modules[0] for stage in self.stages.values()]
        executor = Executor(rank, stages, self.placement, self._channel, Events())
        source = _Samples(micro_batches, 0, self._share(micro_batches), self.device)
        training = [(module, module.training) for stage in modules for module in stage.modules()]
        for stage in modules:
            stage.eval()
        try:
            with self._whole():
                list(executor.run(program.actions_for_batch(rank, program.batch(0, last=True)), source))
                executor.finish()
                return self._mean(executor, micro_batches)
        finally:
            for module, mode in training:
                module.training = mode

    def _share(self, micro_batches: Sequence[Any]) -> float:
        return 1.0 / (len(micro_batches) * self.mesh.size("dp"))

    def _mean(self, executor: Executor, micro_batches: Sequence[Any]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in executor.take_losses().values():
            if self.mesh.coordinate("tp") == 0:  # tensor-parallel ranks hold the same
                total += loss * self._share(micro_batches)
        all_reduce_(total, self.mesh.world)
        return total

    def _agree(self, given: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """The micro-batches, as many on all ranks; the first time, their inputs are compared within each replica.
        Collective. Raises ConfigError on all ranks."""
        if self._broken:
            raise RuntimeFailure(f"{self._broken}; make layers, pipeline and optimizer anew, and load a checkpoint")
        problem, micro_batches = None, list(given)
        try:
            self._check_inputs(micro_batches)
        except ConfigError as error:
            problem = str(error)
        look = problem is None and not self._compared
        own = seen([together(inputs) for inputs, _ in micro_batches]) if look else []
        told = all_gather_json([problem, len(micro_batches), self.mesh.coordinate("dp"), own], self.mesh.world)
        for rank, (theirs, count, _, _) in enumerate(told):
            if theirs is not None:
                raise ConfigError(theirs)
            if count != told[0][1]:
                raise ConfigError(f"micro_batches: {count} on rank {rank}, {told[0][1]} on rank 0; all give as many")
        if other := other_inputs([(replica, tensors) for _, _, replica, tensors in told]):
            raise ConfigError(other)
        self._compared = True
        return micro_batches

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A batch that ends early leaves messages and gradients behind."""
        try:
            yield
        except Exception as error:
            self._broken = f"the pipeline has stopped inside a batch ({type(error).__name__})"
            raise

    def _sum_tied(self) -> None:
        """The gradient of a tied parameter is the sum over its copies."""
        for name in sorted(self.tied):
            copies = [p for key in self.stages for own, p in self.parameters(key) if own == name]
            for parameter in copies:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.shared.start_sum([parameter.grad for parameter in copies if parameter.grad is not None]).wait()


def _listed(layers: Any) -> Sequence[nn.Module]:
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


def _unfit(asynchronous: bool, recomputes: bool) -> str:
    """Why a schedule cannot run modules of one's own; nothing where it can."""
    if recomputes:
        return "it runs forwards again (R), in which modules of your own might draw other random numbers"
    return "it never drains, and a step of the library ends with its batch" if asynchronous else ""


def _check_schedule(name: str) -> None:
    """Raises ScheduleError for one that does not exist, ConfigError for one that cannot run here."""
    fit = [own for own, known in SCHEDULES.items() if not _unfit(known.asynchronous, known.recomputes)]
    try:
        known = find_schedule(name)
    except ScheduleError:
        hint = "".join(f" (did you mean {near!r}?)" for near in get_close_matches(str(name).lower(), fit, n=1))
        raise ScheduleError(f"schedule={name!r}: no such schedule{hint}; one of {', '.join(fit)}") from None
    if why := _unfit(known.asynchronous, known.recomputes):
        raise ConfigError(f"schedule={name!r}: {why}; pretrain_gpt.py runs it; here use one of {', '.join(fit)}")


def _check_free(layers: Sequence[nn.Module]) -> None:
    """Raises ConfigError where another pipeline has these layers: it has changed how their gradients are computed."""
    for index, layer in enumerate(layers):
        if any(hasattr(part, TAKEN) for part in [layer, *layer.parameters()]):
            raise ConfigError(f"layers[{index}]: another pipeline has it; make the layers again for this one")


def _check_values(layers: Sequence[nn.Module]) -> None:
    for index, layer in enumerate(layers):
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            if tensor.is_meta:
                raise ConfigError(
                    f"layers[{index}]: {name.removeprefix(BODY)} is on meta, without values; build the modules on a "
                    "device (the example may be on meta)"
                )


def _take(layers: Sequence[nn.Module]) -> None:
    for layer in layers:
        for part in [layer, *layer.parameters()]:
            setattr(part, TAKEN, True)


class _Samples:
    """A batch for the executor."""

    def __init__(self, given: Sequence[tuple[Any, Any]], first: int, share: float, device: torch.device) -> None:
        self._given, self._first, self._device = given, first, device
        self._share = torch.tensor(share, dtype=torch.float64, device=device)

    def get(self, microbatch: int) -> tuple[Sample, Tensor]:
        inputs, target = self._given[microbatch - self._first]
        moved = target.to(self._device) if isinstance(target, Tensor) else target
        return Sample(tuple(x.to(self._device) for x in together(inputs)), moved), self._share


class _Events(Events):
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def before_backward(self, stage: StageKey, microbatch: int, *, last: bool) -> None:
        if self._pipeline.optimizer is not None:
            self._pipeline.optimizer.before_backward(stage, last=last)
