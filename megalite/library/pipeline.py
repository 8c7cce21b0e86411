"""Any list of modules as a pipeline: stages, messages and programs of `megalite.schedule`, without a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megalite.comm import Channel, ParallelMesh, TensorSpec, all_reduce_
from megalite.config import ParallelConfig
from megalite.engine import BuiltStages, Given, run_forwards
from megalite.errors import ConfigError, RuntimeFailure, ScheduleError
from megalite.inventory import recomputed_layers
from megalite.library.agreement import Agreement, seen
from megalite.library.cutting import Boundary, Tensors
from megalite.library.given import (
    OPERATIONS,
    check_free,
    check_memory,
    check_schedule,
    check_values,
    in_arguments,
    listed,
    take,
    weighed,
)
from megalite.library.modules import LossFunction, Sample, StageModule, sent
from megalite.library.parts import Parts
from megalite.library.sequences import Sequences
from megalite.library.timing import clock_of, watched
from megalite.library.traced_layer import together
from megalite.parallel.pipeline import Events, ForwardOnly, PipelineTracer, executor_of, start_shared_sum
from megalite.schedule import (
    BatchRange,
    Program,
    StageKey,
    build_program,
    forward_program,
    lower,
    merge_backward,
    validate,
)

if TYPE_CHECKING:
    from megalite.library.optimizer import ShardedOptimizer


class Pipeline:
    """Modules, one after the other, over the pipeline ranks of a mesh.

    layers: modules that take and return one tensor, or a tuple (its tensors are the arguments of the next layer); all
        ranks give the same list, with the same values, and each keeps those of its stages. `layers_from_module` makes
        them of one module.
    loss: (what the last layer returns, target) -> 0-dim, the mean over the micro-batch.
    example: a micro-batch's input, one tensor or a tuple, for its shape and dtype, which all micro-batches have; it may
        be on `meta`.
    schedule: a name of `megalite.SCHEDULES`, or a program of your own (`parse_program`), which fixes the number of
        micro-batches; None: 1F1B. One that never drains (2bw, pipedream) needs a `ShardedOptimizer`.
    mesh: the grid of ranks; the context-parallel size is 1, the tensor-parallel one that of `layers_from_module`. None:
        one process.
    chunks: stages of each rank, where the schedule leaves the choice (interleaved).
    sizes: number of layers of each stage; None: cut so that the fullest stage is as light as possible.
    balance: what a layer weighs: its 'operations' (the slowest stage is as fast as possible) or its 'parameters', or a
        number for each layer, such as its seconds (`time_layers`); of ranks that differ the largest counts.
    recompute_num_layers: recompute in backward: of each chunk of so many layers of a stage its input alone is kept;
        recompute_method='block': of each of the first so many. None: nothing is recomputed.
    cpu_offloading_num_layers: first layers of each stage whose activations wait in host memory for their backward.
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
        balance: str | Sequence[float] = OPERATIONS,
        recompute_num_layers: int | None = None,
        recompute_method: str = "uniform",
        cpu_offloading_num_layers: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        self.mesh = mesh or ParallelMesh.single()
        self.schedule, self.chunks = schedule or ParallelConfig().schedule, chunks
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        layers, given = listed(layers), together(example)
        check_free(layers)
        self._check(layers)
        balance = weighed(balance, len(layers), self.mesh.world)
        check_memory(recompute_num_layers, recompute_method, cpu_offloading_num_layers)
        self._programs: dict[int, Program] = {}
        self.batches = self.microbatches = 0  # that have been trained on
        self.drained = True
        self._announced: list[tuple[Any, Any]] = []
        self._losses: dict[int, Tensor] = {}
        self._running: tuple[Program, BatchRange] | None = None
        own = schedule.num_microbatches if isinstance(schedule, Program) else 2 * self.mesh.size("pp")
        self.base_program = program = self.program(own)  # by which weights are kept: versions, staleness, buffers
        self.placement = program.placement
        self.parts = Parts(layers, self._sequences.share(given), program, self.device, balance=balance, sizes=sizes)
        starts = [TensorSpec(tuple(given[0].shape), torch.int64, self.device)] if self._sequences.documents else []
        self._given = Boundary((*(TensorSpec(tuple(x.shape), x.dtype, self.device) for x in given), *starts))
        self.cuts, self.names, self.tied = self.parts.cuts, self.parts.names, self.parts.tied
        check_values(layers)
        keys = self.placement.stages_of(self.mesh.coordinate("pp"))
        self.built: BuiltStages = {}
        again = ("block", 0) if recompute_num_layers is None else (recompute_method, recompute_num_layers)
        for key in keys:
            ranges = recomputed_layers(0, len(self.cuts[key[0]]), *again)
            self.built[key] = self.parts.stage(key, loss, ranges, StageModule, cpu_offloading_num_layers)
        self.stages = {key: stage for key, (stage, _) in self.built.items()}
        self.parts.layers.clear()  # those of other ranks' stages go with the user's references
        down, up = (self.mesh.over("pp", apart=direction) for direction in ("down", "up"))
        self._channel = Channel(down, up, self.placement.neighbours)
        self._broken = ""
        self._agreement = Agreement(self.mesh.world, self.mesh.coordinate("dp"), self.device)
        self._tied_axis = self.mesh.through(self.parts.ties.ranks, apart="tied")
        parts = self.stages, self.placement, self._channel, Events()
        self._executor = executor_of(program, self.mesh, *parts, synchronize=clock_of(self.device))
        self.optimizer: ShardedOptimizer | None = None
        self._tracer: PipelineTracer | None = None
        take(layers)

    def _check(self, layers: Sequence[nn.Module]) -> None:
        if isinstance(self.schedule, Program):
            if self.schedule.num_ranks != self.mesh.size("pp"):
                raise ConfigError(
                    f"schedule {self.schedule.name!r}: a program of {self.schedule.num_ranks} ranks, the mesh has "
                    f"pp={self.mesh.size('pp')}"
                )
        else:
            check_schedule(self.schedule)
        told = {getattr(layer, "sequences", Sequences()) for layer in layers}
        self._sequences, cp = told.pop(), self.mesh.size("cp")
        if told or self._sequences.cp.size != cp:
            raise ConfigError(
                f"mesh: cp={cp}: sequences of your own are not cut; make it 1, or give layers_from_module this mesh"
            )
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
            if not self._given.fits(given):
                found = " and ".join(f"{tuple(x.shape)} of {x.dtype}" for x in given)
                more = " (the last: where documents begin)" if self._sequences.documents else ""
                raise ConfigError(
                    f"micro_batches[{index}]: its input is {found}, the example was {self._given}{more}; all must "
                    "be like it"
                )

    def layers(self, key: StageKey | None = None, version: int = 0) -> list[tuple[int, nn.Module]]:
        """(Number, layer) of a stage of this rank, or of all of them, in a weight version."""
        modules: list[Any] = [self.stages[each].module(version) for each in (self.stages if key is None else [key])]
        return [pair for module in modules for pair in enumerate(module.layers, module.first)]

    def trace(self, path: str) -> None:
        """The next `step` writes its timeline to a file (.html, .json: with the plan; .svg, .txt). On all ranks."""
        if not path.endswith((".html", ".json", ".svg", ".txt")):
            raise ConfigError(f"trace: {path}: unknown form; end the name in .html, .json, .svg or .txt")
        self._tracer = PipelineTracer(path, self._executor, self.mesh, 1)

    def parameters(self, key: StageKey) -> list[tuple[str, nn.Parameter]]:
        """(Name, parameter) of what learns in a stage of this rank."""
        return [*self.parts.held[key].trained]

    def own_weights(self, optimizer: ShardedOptimizer) -> None:
        """From now on gradients go to `optimizer`, and the weights are its versions."""
        self.optimizer, self._executor.events = optimizer, optimizer.events

    def program(self, microbatches: int) -> Program:
        """The validated program of a batch of so many micro-batches a replica. Raises ScheduleError."""
        if microbatches not in self._programs:
            try:
                own = self.schedule
                if isinstance(own, str):
                    own = build_program(own, self.mesh.size("pp"), microbatches, self.chunks)
                if (has := own.num_microbatches) != microbatches:
                    raise ScheduleError(f"{own.name}: its batch has {has} micro-batches, not {microbatches}")
                program = lower(merge_backward(own))
                validate(program)
            except ScheduleError as error:
                raise ScheduleError(in_arguments(error.text)) from None
            self._programs[microbatches] = program
        return self._programs[microbatches]

    @torch.enable_grad()
    def step(
        self, micro_batches: Sequence[tuple[Any, Any]], following: Sequence[tuple[Any, Any]] | None = None
    ) -> Tensor:
        """Forward and backward of a batch: (input, target) of each micro-batch of this replica, the same list on all of
        its pipeline ranks (inputs are read on the first stage, targets on the last).

        following: the batch that the next call gives, of as many micro-batches. A schedule that never drains begins
            it, and drains where there is none; others have no use for it.

        Returns the loss, the mean over all micro-batches of all replicas, 0-dim and the same on every rank. Gradients
        go to the `ShardedOptimizer`, or where there is none to `.grad`. Raises ScheduleError for a
        number of micro-batches that the schedule does not take.
        """
        if self.optimizer is None and self._replicas * self.placement.num_replicas > 1:
            name = "dp" if self.mesh.size("dp") > 1 else "cp"
            mesh, twice = f"mesh: {name}={self.mesh.size(name)}", f"schedule={self.schedule!r}: holds each stage twice"
            what = mesh if self._replicas > 1 else twice
            raise ConfigError(f"{what}: make a ShardedOptimizer, which sums the gradients")
        micro_batches = list(micro_batches)
        if not self._announced:
            micro_batches = self._agree(micro_batches)
        elif [id(pair) for pair in micro_batches] != [id(pair) for pair in self._announced]:
            raise ConfigError("micro_batches: not those that the call before announced as 'following'")
        program = self.program(len(micro_batches))
        if self.optimizer is None and program.asynchronous:
            raise ConfigError(f"schedule={program.name!r}: never drains, so it needs a ShardedOptimizer")
        announced = self._agree(following) if following is not None and program.asynchronous else []
        if announced and len(announced) != len(micro_batches):
            raise ConfigError(f"following: {len(announced)} micro-batches after {len(micro_batches)}; give as many")
        if self.optimizer is not None:
            self.optimizer.begin_batch()
        self._announced, next_size = announced, len(announced)
        batch = BatchRange(self.batches, self.microbatches, len(micro_batches), next_size, first=self.drained)
        self._running = program, batch
        together = 1 if program.update_per_microbatch else len(micro_batches)
        known, factor = [*micro_batches, *announced], 1.0 / (together * self._replicas)
        samples = [self._sample(pair) for pair in known]
        source = Given(samples, torch.full((), factor, dtype=torch.float64, device=self.device), self.microbatches)
        with self._whole(), watched(self._executor, self._tracer, program, batch):
            for action in self._executor.run(program.actions_for_batch(self.mesh.coordinate("pp"), batch), source):
                if self.optimizer is not None:
                    self.optimizer.execute(action)
            self.drained = next_size == 0
            if self.drained:
                self._executor.finish()
            if self.optimizer is None:
                self._sum_tied()
            self.batches, self.microbatches = self.batches + 1, batch.end
            self._losses |= self._executor.take_losses()
            own = [self._losses.pop(number) for number in range(batch.start, batch.end) if number in self._losses]
            self._tracer = None
            return self._mean(own, micro_batches)

    def update_of(self, microbatch: int) -> int:
        """Number of the update that a gradient of the batch that runs, or of the next one, belongs to."""
        assert self._running is not None, "no batch has run"
        program, batch = self._running
        return program.update_of(microbatch, batch)

    def check_drained(self, what: str) -> None:
        """Raises ConfigError where the next batch has begun, or ranks have found that they disagree."""
        self._agreement.settle()
        if not self.drained:
            raise ConfigError(f"{what}: the next batch has begun; give the step before it no 'following'")

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[tuple[Any, Any]]) -> Tensor:
        """The loss of a batch as `step` returns it, by forwards alone, with the layers in evaluation mode."""
        self.check_drained("Pipeline.evaluate")
        micro_batches = self._agree(micro_batches)
        program = forward_program(self.placement, len(micro_batches))
        modules = [module for stage in self.stages.values() for module in stage.modules]
        samples = [self._sample(pair) for pair in micro_batches]
        training = [(module, module.training) for stage in modules for module in stage.modules()]
        for stage in modules:
            stage.eval()
        try:
            with self._whole(), nullcontext(0) if self.optimizer is None else self.optimizer.masters() as version:
                stages = {key: ForwardOnly(stage, version) for key, stage in self.stages.items() if key[1] == 0}
                found = run_forwards(program, self.mesh.coordinate("pp"), stages, self._channel, samples)
                return self._mean(list(found.values()), micro_batches)
        finally:
            for module, mode in training:
                module.training = mode

    @property
    def _replicas(self) -> int:
        """Ranks that compute with tokens of their own."""
        return self.mesh.size("dp") * self.mesh.size("cp")

    def _sample(self, given: tuple[Any, Any]) -> Sample:
        inputs, target = given
        moved = sent(target, self.device) if isinstance(target, Tensor) else target
        own, microbatch = self._sequences.cut(tuple(sent(x, self.device) for x in together(inputs)))
        if microbatch is not None and microbatch.places is not None:
            if not isinstance(moved, Tensor) or moved.shape[:2] != self._given.specs[0].shape:
                raise ConfigError("micro_batches: ranks share sequences, so a target is a tensor [b, s, ...]")
            moved = moved[:, microbatch.places]
        return Sample(own, moved, microbatch=microbatch)

    def _mean(self, losses: Sequence[Tensor], micro_batches: Sequence[Any]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:
            if self.mesh.coordinate("tp") == 0:  # tensor-parallel ranks hold the same
                total += loss * (1.0 / (len(micro_batches) * self._replicas))
        all_reduce_(total, self.mesh.world)
        return total

    def _agree(self, given: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """The micro-batches, as many on all ranks; the first time, their inputs are compared within each replica.
        Collective. Raises ConfigError: `Agreement`."""
        if self._broken:
            raise RuntimeFailure(f"{self._broken}; make layers, pipeline and optimizer anew, and load a checkpoint")
        problem, micro_batches = None, list(given)
        try:
            self._check_inputs(micro_batches)
        except ConfigError as error:
            problem = str(error)
        with self._whole() if self._agreement.late else nullcontext():
            self._agreement.reach(
                problem, len(micro_batches), lambda: seen([together(inputs) for inputs, _ in micro_batches])
            )
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
            start_shared_sum(self._tied_axis, [copy.grad for copy in copies if copy.grad is not None]).wait()
