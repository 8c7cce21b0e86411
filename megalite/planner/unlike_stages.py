"""The best pipeline whose stages may differ: layers and submeshes by `inter_operator.plan_stages`, at every micro-batch
size, with memory for the micro-batches in flight; the best ones are then simulated as the programs that would run.

Devices are in the order of ranks. Where a cluster has nodes of several kinds (`classes`), a stage lies on one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import gcd, lcm

from megalite.config import Config, ParallelConfig, StageLayout, layout_problems
from megalite.errors import ScheduleError
from megalite.inventory import ElementBytes, boundary_bytes, given_recompute
from megalite.planner.activations import stage_activations
from megalite.planner.communication import CommGroup, stage_elements
from megalite.planner.cost import TimeSource
from megalite.planner.hardware import Hardware
from megalite.planner.inter_operator import StageCost, StagePlan, Submesh, plan_stages
from megalite.planner.memory import pipeline_memory
from megalite.planner.predict import program_of
from megalite.planner.search_space import divisors
from megalite.schedule import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    Costs,
    Partition,
    Program,
    build_program,
    compact_layout,
    simulate,
)

MOST_GROUPS = 16
"""Blocks are moved between stages in at most so many groups of neighbours (Alpa's clusters of operators)."""
MOST_UNITS = 64
"""Devices are counted in at most so many."""
TRIED_MICRO = (1, 2, 4, 8)


@dataclass(frozen=True)
class DeviceClass:
    """`devices` neighbours of one kind."""

    devices: int
    hardware: Hardware
    source: TimeSource


@dataclass(frozen=True)
class UnlikePlan:
    """A configuration that runs, and what a batch of it takes. seconds: simulated. kinds: of devices, of each stage."""

    config: Config
    seconds: float
    stages: StagePlan
    kinds: tuple[int, ...]


def best_unlike(config: Config, classes: Sequence[DeviceClass], *, stale: bool = False) -> UnlikePlan | None:
    """The fastest pipeline on all devices of the classes, in their order; None where none fits, or none has several
    stages.

    config: with vocabulary and global batch size resolved; its layout is replaced. stale: also 2BW.
    """
    devices = sum(each.devices for each in classes)
    found: list[UnlikePlan] = []
    for micro in TRIED_MICRO:
        batch = config.training.global_batch_size or 0
        if batch % micro:
            continue
        for schedule in _schedules(stale):
            one = _Problem(_plain(config, micro, schedule), tuple(classes), devices, batch // micro)
            for room in (1.0, 0.9, 0.75):  # what closed forms leave out
                plan = one.plan(room)
                made = None if plan is None or len(plan.stages) < 2 else one.made(plan)
                if made is not None:
                    found.append(made)
                    break
    return min(found, key=lambda made: made.seconds, default=None)


def _schedules(stale: bool) -> list[str]:
    """The default one, and those that never drain and update once a batch."""
    endless = [
        name
        for name, schedule in SCHEDULES.items()
        if schedule.takes_turns and schedule.asynchronous and not schedule.update_per_microbatch
    ]
    return [ParallelConfig().schedule, *(endless if stale else [])]


def _plain(config: Config, micro: int, schedule: str) -> Config:
    """Without a layout."""
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        stage_meshes=None,
        stage_layout=StageLayout(),
        pipeline_schedule=schedule,
        sequence_parallel=True,
        zero_stage=1,
        nprocs=None,
    )
    return replace(config, parallel=parallel, training=replace(config.training, micro_batch_size=micro))


@dataclass(frozen=True)
class _Problem:
    """One micro-batch size and schedule. config: without a layout. microbatches: of a batch."""

    config: Config
    classes: tuple[DeviceClass, ...]
    devices: int
    microbatches: int

    @property
    def asynchronous(self) -> bool:
        """Whether the pipeline never drains."""
        found: bool = SCHEDULES[self.config.parallel.schedule].asynchronous
        return found

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """Where a stage may begin or end among [embedding, block 0, ..., head]: at the ends, and between groups of
        blocks."""
        blocks = self.config.model.num_layers
        groups = min(blocks, MOST_GROUPS)
        inner = [1 + blocks * number // groups for number in range(groups + 1)]
        return (0, *inner, blocks + 2)

    @cached_property
    def unit(self) -> int:
        """A power of two that divides every class, so that there are few."""
        whole = gcd(*(each.devices for each in self.classes))
        unit = 1
        while self.devices // unit > MOST_UNITS and whole % (2 * unit) == 0:
            unit *= 2
        return unit

    @cached_property
    def meshes(self) -> list[Submesh]:
        """Tensor-parallel sizes within a node that the model allows, times powers of two of replicas that divide the
        batch."""
        model, node = self.config.model, min(each.hardware.devices_per_node for each in self.classes)
        wide = [
            tp
            for tp in divisors(model.num_attention_heads)
            if tp <= node and model.legal_tensor_size(tp) and model.ffn_size % tp == 0 and model.seq_length % tp == 0
        ]
        found = [Submesh(tp, dp) for tp in wide for dp in divisors(self.microbatches) if dp & (dp - 1) == 0 or dp < 8]
        return [mesh for mesh in found if mesh.size <= self.devices and mesh.size % self.unit == 0]

    def _class_of(self, left: int, size: int) -> int | None:
        """The kind of the `size` devices behind which `left - size` are left; None: they are of several."""
        begin, at = self.devices - left, 0
        for number, each in enumerate(self.classes):
            at += each.devices
            if begin < at:
                return number if begin + size <= at else None
        return None

    @cached_property
    def _sums(self) -> dict[tuple[int, int], tuple[list[float], ...]]:
        """(Kind, tp) -> of all items up to each edge: seconds of forward and backward, elements, bytes kept of one
        micro-batch."""
        found = {}
        for number, each in enumerate(self.classes):
            for tp in {mesh.tp for mesh in self.meshes}:
                view = self._view(tp)
                times = [one.forward + one.backward for one in each.source.layers(view)]
                spans = [range(a, b) for a, b in zip(self.edges, self.edges[1:], strict=False)]
                elements = [stage_elements(view, span) for span in spans]
                kept = [
                    stage_activations(view, span, given_recompute(view.model)[0], on_cpu=each.hardware.on_cpu).total
                    for span in spans
                ]
                seconds = [sum(times[span.start : span.stop]) for span in spans]
                found[number, tp] = tuple([0.0, *accumulate(map(float, row))] for row in (seconds, elements, kept))
        return found

    def _view(self, tp: int) -> Config:
        return replace(self.config, parallel=replace(self.config.parallel, tensor_model_parallel_size=tp))

    def plan(self, room: float) -> StagePlan | None:
        """By closed forms. room: part of the devices' memory that these may fill."""
        size, versions = ElementBytes.of(self.config), 2 if self.asynchronous else 1
        sums, many, memory = self._sums, len(self.classes) > 1, {}
        whole = boundary_bytes(self._view(1))
        links: dict[tuple[int, Submesh], tuple[CommGroup, float]] = {}
        for number, each in enumerate(self.classes):
            memory[number] = room * each.hardware.usable_bytes
            for mesh in self.meshes:
                far = many or self.devices > each.hardware.devices_per_node
                link = each.hardware.inter_node if far else each.hardware.intra_node
                hop = 2 * (link.latency + whole / mesh.tp / link.bandwidth)
                links[number, mesh] = CommGroup(each.hardware, mesh.dp, mesh.tp), hop

        def cost(begin: int, end: int, mesh: Submesh, left: int) -> StageCost | None:
            number = self._class_of(left, mesh.size)
            if number is None:
                return None
            seconds, elements, kept = (row[end] - row[begin] for row in sums[number, mesh.tp])
            flying = min(-(-left // mesh.size), -(-self.microbatches // mesh.dp))
            states = versions * size.compute + size.gradient + 3.0 * size.wide / mesh.dp
            if elements * states + kept * flying > memory[number]:
                return None
            group, hop = links[number, mesh]
            open_part = 1 - self.classes[number].hardware.overlap
            reduce = open_part * group.all_reduce(elements * size.gradient)
            latency = seconds + hop
            return StageCost(latency, latency / mesh.dp + reduce / self.microbatches)

        return plan_stages(
            len(self.edges) - 1,
            self.devices,
            self.meshes,
            cost,
            self.microbatches,
            asynchronous=self.asynchronous,
            unit=self.unit,
            tolerance=1e-3 if self.unit > 1 else 0.0,
        )

    def made(self, plan: StagePlan) -> UnlikePlan | None:
        """As a configuration, simulated; None where it is not legal or does not fit."""
        bounds = tuple((self.edges[stage.begin], self.edges[stage.end]) for stage in plan.stages)
        cut = Partition(self.config.model.num_layers, bounds)
        meshes = [stage.mesh for stage in plan.stages]
        parallel = replace(
            self.config.parallel,
            stage_meshes=",".join(f"{mesh.tp}x{mesh.dp}" for mesh in meshes),
            pipeline_model_parallel_size=len(meshes),
            stage_layout=StageLayout(pipeline_model_parallel_layout=compact_layout(cut)),
            sequence_parallel=any(mesh.tp > 1 for mesh in meshes),
        )
        alike = len(set(meshes)) == 1
        if alike:
            parallel = replace(parallel, tensor_model_parallel_size=meshes[0].tp)
        config = replace(self.config, parallel=parallel)
        if layout_problems(config, self.devices) or parallel.schedule_problems(self._per_replica(parallel)):
            return None
        cuts = [cut.items(stage) for stage in range(cut.num_stages)]
        try:
            program = program_of(config, self.devices)
            memory = pipeline_memory(config, self.devices, program, cuts, on_cpu=self.classes[0].hardware.on_cpu)
        except ScheduleError:
            return None
        kinds = self._kinds(meshes)
        for rank, needed in enumerate(memory):
            kind = kinds[program.placement.stages_of(rank)[0][0]]
            if needed.total > self.classes[kind].hardware.usable_bytes:
                return None
        return UnlikePlan(config, self.seconds(plan), plan, tuple(kinds))

    def _per_replica(self, parallel: ParallelConfig) -> int:
        """Micro-batches of a batch as a schedule counts them."""
        return self.microbatches // parallel.data_parallel_size(self.devices)

    def _kinds(self, meshes: Sequence[Submesh]) -> list[int]:
        left, found = self.devices, []
        for mesh in meshes:
            found.append(self._class_of(left, mesh.size) or 0)
            left -= mesh.size
        return found

    def seconds(self, plan: StagePlan) -> float:
        """Of a batch, by the simulator: two short batches give fill and pace; then what of the reduction is not hidden,
        and the optimizer."""
        meshes = [stage.mesh for stage in plan.stages]
        workers, size = tuple(mesh.dp for mesh in meshes), ElementBytes.of(self.config)
        exact, after = {}, 0.0
        for number, (stage, kind) in enumerate(zip(plan.stages, self._kinds(meshes), strict=True)):
            each, view = self.classes[kind], self._view(stage.mesh.tp)
            items = range(self.edges[stage.begin], self.edges[stage.end])
            times = each.source.layers(view)
            exact[number, FORWARD] = sum(times[item].forward for item in items)
            exact[number, BACKWARD] = sum(times[item].backward for item in items)
            elements = stage_elements(view, items)
            reduce = CommGroup(each.hardware, stage.mesh.dp, stage.mesh.tp).all_reduce(elements * size.gradient)
            step = each.source.optimizer_step(view, elements / stage.mesh.dp)
            after = max(after, (1 - each.hardware.overlap) * reduce + step)
        costs = Costs(exact=exact)

        def takes(microbatches: int) -> float:
            program: Program = build_program(self.config.parallel.schedule, len(meshes), microbatches, workers=workers)
            batches = 3 if program.asynchronous else 1
            return float(simulate(program, costs, batches=batches).makespan) / batches

        together = lcm(*workers)
        short = min(self.microbatches, 4 * together * -(-sum(workers) // together))
        first = takes(short)
        if short == self.microbatches:
            return first + after
        longer = min(self.microbatches, 2 * short)
        pace = (takes(longer) - first) / (longer - short)
        return first + pace * (self.microbatches - short) + after
