"""The best pipeline whose stages may differ: layers and submeshes by `inter_operator.plan_stages`, at every micro-batch
size, with memory for the micro-batches in flight and both ways to share a block that the engine runs; the best ones
are then simulated as the programs that would run.

Devices are in the order of ranks. Where a cluster has nodes of several kinds (`classes`), a stage lies on one kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import gcd, lcm
from typing import NamedTuple

from megalite.config import Config, ParallelConfig, StageLayout, StageMesh, divisors, layout_problems
from megalite.errors import ScheduleError
from megalite.inventory import ElementBytes, boundary_bytes, given_recompute
from megalite.planner.activations import stage_activations
from megalite.planner.communication import CommGroup, stage_elements
from megalite.planner.cost import Roofline
from megalite.planner.hardware import Hardware
from megalite.planner.inter_operator import StageCost, StagePlan, plan_stages
from megalite.planner.memory import PlannedStages, pipeline_memory
from megalite.planner.search_space import Layout, apply
from megalite.schedule import BACKWARD, FORWARD, SCHEDULES, Costs, build_program, compact_layout, simulate

MOST_GROUPS = 16
"""Blocks are moved between stages in at most so many groups of neighbours (Alpa's clusters of operators)."""
MOST_UNITS = 64  # devices are counted in at most so many
TRIED_MICRO = (1, 2, 4, 8)
ROOMS = (1.0, 0.9, 0.75, 0.6)  # parts of the memory that closed forms may fill, until what they leave out fits, too


class DeviceClass(NamedTuple):
    """`devices` neighbours of one kind."""

    devices: int
    hardware: Hardware
    source: Roofline


class UnlikePlan(NamedTuple):
    """A configuration that runs, and what a batch of it takes."""

    config: Config
    seconds: float  # simulated
    stages: StagePlan
    kinds: tuple[int, ...]  # of devices, of each stage


def best_unlike(config: Config, classes: Sequence[DeviceClass], *, stale: bool = False) -> UnlikePlan | None:
    """The fastest pipeline on all devices of the classes, in their order; None where none fits, or none has several
    stages.

    config: with vocabulary and global batch size resolved; its layout is replaced. stale: also 2BW.
    """
    batch = config.training.global_batch_size or 0
    late = [name for name, each in SCHEDULES.items() if stale and each.takes_turns and each.flush_schedule]
    found: list[UnlikePlan] = []
    for micro, schedule, sequence in product(TRIED_MICRO, (ParallelConfig().schedule, *late), (True, False)):
        if batch % micro == 0:
            layout = Layout(1, 1, 1, None, sequence, schedule, 1, micro, config.model.recompute_granularity)
            plain = apply(config, layout)
            parallel = replace(plain.parallel, stage_meshes=None, stage_layout=StageLayout(), nprocs=None)
            one = _Problem(replace(plain, parallel=parallel), tuple(classes), batch // micro)
            tried = (one.made(plan) for room in ROOMS if (plan := one.plan(room)) and len(plan.stages) > 1)
            found += filter(None, [next(filter(None, tried), None)])
    return min(found, key=lambda made: made.seconds, default=None)


@dataclass(frozen=True)
class _Problem:
    """One micro-batch size, schedule and way of sharing blocks. config: without a layout. microbatches: of a batch."""

    config: Config
    classes: tuple[DeviceClass, ...]
    microbatches: int

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """Where a stage may begin or end among [embedding, block 0, ..., head]: at the ends, and between groups of
        blocks."""
        blocks = self.config.model.num_layers
        groups = min(blocks, MOST_GROUPS)
        return (0, *(1 + blocks * number // groups for number in range(groups + 1)), blocks + 2)

    @cached_property
    def unit(self) -> int:
        """A power of two that divides every class, so that there are few."""
        fewest = 2 ** max(0, (-(-len(self.kinds) // MOST_UNITS) - 1).bit_length())
        return gcd(fewest, *(each.devices for each in self.classes))

    @cached_property
    def meshes(self) -> list[StageMesh]:
        """Tensor-parallel sizes within a node that the model allows, times powers of two of replicas that divide the
        batch."""
        model, node = self.config.model, min(each.hardware.devices_per_node for each in self.classes)
        sizes = divisors(gcd(model.num_attention_heads, model.ffn_size, model.seq_length))
        wide = [tp for tp in sizes if tp <= node and model.legal_tensor_size(tp)]
        found = [StageMesh(tp, dp) for tp in wide for dp in divisors(self.microbatches) if dp & (dp - 1) == 0 or dp < 8]
        return [mesh for mesh in found if mesh.size <= len(self.kinds) and mesh.size % self.unit == 0]

    @cached_property
    def kinds(self) -> list[int]:
        """Of each device, the number of its class."""
        return [number for number, each in enumerate(self.classes) for _ in range(each.devices)]

    @cached_property
    def _sums(self) -> dict[tuple[int, int], tuple[list[float], ...]]:
        """(Kind, tp) -> of all items up to each edge: seconds of forward and backward, elements, bytes kept of one
        micro-batch."""
        found, spans = {}, [range(a, b) for a, b in pairwise(self.edges)]
        for (number, each), tp in product(enumerate(self.classes), {mesh.tp for mesh in self.meshes}):
            view, on_cpu = self._view(tp), each.hardware.on_cpu
            times = [one.forward + one.backward for one in each.source.layers(view)]
            again = given_recompute(view.model)[0]
            rows = (
                [sum(times[span.start : span.stop]) for span in spans],
                [stage_elements(view, span) for span in spans],
                [stage_activations(view, span, again, on_cpu=on_cpu).total for span in spans],
            )
            found[number, tp] = tuple([0.0, *accumulate(map(float, row))] for row in rows)
        return found

    def _view(self, tp: int) -> Config:
        return replace(self.config, parallel=replace(self.config.parallel, tensor_model_parallel_size=tp))

    def _hop(self, hardware: Hardware, tp: int) -> float:
        """Seconds of a boundary tensor's way to the next stage: each card sends its part, in either way of sharing."""
        near = len(self.classes) == 1 and len(self.kinds) <= hardware.devices_per_node
        link = hardware.intra_node if near else hardware.inter_node
        return link.latency + boundary_bytes(self._view(1)) / tp / link.bandwidth

    def plan(self, room: float) -> StagePlan | None:
        """By closed forms. room: part of the devices' memory that these may fill."""
        size, endless = ElementBytes.of(self.config), SCHEDULES[self.config.parallel.schedule].asynchronous
        sums, links = self._sums, {}
        for (number, each), mesh in product(enumerate(self.classes), self.meshes):
            links[number, mesh] = CommGroup(each.hardware, mesh.dp, mesh.tp), 2 * self._hop(each.hardware, mesh.tp)

        def cost(begin: int, end: int, mesh: StageMesh, left: int) -> StageCost | None:
            first = len(self.kinds) - left
            number, last = self.kinds[first], self.kinds[first + mesh.size - 1]
            if number != last:
                return None
            seconds, elements, kept = (row[end] - row[begin] for row in sums[number, mesh.tp])
            hardware, (group, hop) = self.classes[number].hardware, links[number, mesh]
            flying = min(-(-left // mesh.size), -(-self.microbatches // mesh.dp))
            states = (1 + endless) * size.compute + size.gradient + 3.0 * size.wide / mesh.dp
            if elements * states + kept * flying > room * hardware.usable_bytes:
                return None
            reduce = (1 - hardware.overlap) * group.all_reduce(elements * size.gradient)
            return StageCost(seconds + hop, (seconds + hop) / mesh.dp + reduce / self.microbatches)

        layers, unit = len(self.edges) - 1, self.unit
        return plan_stages(
            layers, len(self.kinds), self.meshes, cost, self.microbatches, asynchronous=endless, unit=unit
        )

    def made(self, plan: StagePlan) -> UnlikePlan | None:
        """As a configuration, simulated; None where it is not legal or does not fit."""
        meshes = [stage.mesh for stage in plan.stages]
        stages = [range(self.edges[stage.begin], self.edges[stage.end]) for stage in plan.stages]
        parallel = replace(
            self.config.parallel,
            stage_meshes=",".join(map(str, meshes)),
            pipeline_model_parallel_size=len(meshes),
            stage_layout=StageLayout(pipeline_model_parallel_layout=compact_layout(stages)),
            sequence_parallel=self.config.parallel.sequence_parallel and any(mesh.tp > 1 for mesh in meshes),
            tensor_model_parallel_size=meshes[0].tp if len(set(meshes)) == 1 else 1,
        )
        config = replace(self.config, parallel=parallel)
        if layout_problems(config, len(self.kinds)) or parallel.schedule_problems(
            config.num_microbatches(len(self.kinds))
        ):
            return None
        try:
            on_cpu = self.classes[0].hardware.on_cpu
            run = PlannedStages.of(config, len(self.kinds), on_cpu=on_cpu, cuts=stages)
            memory = pipeline_memory(run)
        except ScheduleError:
            return None
        kinds = tuple(self.kinds[first] for first in accumulate((mesh.size for mesh in meshes[:-1]), initial=0))
        rooms = [self.classes[kinds[run.stages_of(r)[0]]].hardware for r in range(len(memory))]
        if any(needed.total > room.usable_bytes for needed, room in zip(memory, rooms, strict=True)):
            return None
        return UnlikePlan(config, self.seconds(meshes, stages, kinds), plan, kinds)

    def seconds(self, meshes: Sequence[StageMesh], stages: Sequence[range], kinds: Sequence[int]) -> float:
        """Of a batch, by the simulator: two short batches give fill and pace; then what of the reduction is not hidden,
        and the optimizer. stages: their items."""
        workers, size = tuple(mesh.dp for mesh in meshes), ElementBytes.of(self.config)
        exact, after, hop = {}, 0.0, 0.0
        for number, (mesh, items, kind) in enumerate(zip(meshes, stages, kinds, strict=True)):
            each, view = self.classes[kind], self._view(mesh.tp)
            times = each.source.layers(view)[items.start : items.stop]
            exact[number, FORWARD] = sum(one.forward for one in times)
            exact[number, BACKWARD] = sum(one.backward for one in times)
            elements = stage_elements(view, items)
            reduce = CommGroup(each.hardware, mesh.dp, mesh.tp).all_reduce(elements * size.gradient)
            step = each.source.optimizer_step(view, elements / mesh.dp)
            after = max(after, (1 - each.hardware.overlap) * reduce + step)
            hop = max(hop, self._hop(each.hardware, mesh.tp))

        def takes(microbatches: int) -> float:
            program = build_program(self.config.parallel.schedule, len(meshes), microbatches, workers=workers)
            batches = 3 if program.asynchronous else 1
            return float(simulate(program, Costs(communication=hop, exact=exact), batches=batches).makespan) / batches

        together = lcm(*workers)
        short = min(self.microbatches, 4 * together * -(-sum(workers) // together))
        longer = min(self.microbatches, 2 * short)
        first = takes(short)
        pace = (takes(longer) - first) / (longer - short) if longer > short else 0.0
        return first + pace * (self.microbatches - short) + after
