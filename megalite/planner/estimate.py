"""Closed forms of seconds and bytes: what ranks all layouts before the best of them are simulated."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from megalite.config import OPTIMIZER_SPECS, Config
from megalite.inventory import ElementBytes, MemoryPlan, boundary_bytes, given_plan, given_recompute
from megalite.planner.activations import recomputed, stage_activations
from megalite.planner.communication import CommGroup, Copies, families_of, stage_elements
from megalite.planner.cost import LayerTimes, Roofline, mean_times
from megalite.planner.hardware import Hardware
from megalite.planner.memory import PlannedStages, RankMemory, pipeline_memory
from megalite.planner.predict import Prediction, predict, program_of
from megalite.planner.search_space import Layout, Sizes, apply
from megalite.planner.uneven import MemoryHeadroom, recomputing
from megalite.schedule import ScheduleShape, default_schedule, find_schedule


class _Shared(NamedTuple):
    """Of layouts that compute the same."""

    config: Config
    block: LayerTimes  # of a mean block
    ends: float  # seconds of embedding and head together
    block_bytes: float  # the fewest that a mean block may keep
    boundary: float  # bytes of a message to the next stage


@dataclass
class FastEstimator:
    """Closed forms of seconds and bytes, with what layouts share computed once."""

    config: Config
    world_size: int
    hardware: Hardware
    source: Roofline
    _layers: dict[tuple[object, ...], _Shared] = field(default_factory=dict)
    _elements: dict[tuple[int, int, int], dict[str, int]] = field(default_factory=dict)

    @cached_property
    def size(self) -> ElementBytes:
        """Of every layout."""
        return ElementBytes.of(self.config)

    def _shared(self, layout: Layout) -> _Shared:
        key = (
            layout.tensor_model_parallel_size,
            layout.context_parallel_size,
            layout.micro_batch_size,
            layout.sequence_parallel,
            layout.recompute_granularity,
            layout.expert_model_parallel_size,
            layout.expert_tensor_size,
        )
        if key not in self._layers:
            config = apply(self.config, layout)
            blocks = config.model.num_layers
            lean = config
            if config.model.recompute_method == "block":  # some stage may recompute all that it has
                lean = recomputing(config, [blocks], [blocks])
            (how, *_) = given_recompute(lean.model)
            kept = stage_activations(lean, range(1, blocks + 1), how, on_cpu=self.hardware.on_cpu)
            first, *between, last = self.source.layers(config)
            ends = sum(end.forward + end.backward for end in (first, last))
            nbytes = (kept.full + kept.boundary) / blocks
            self._layers[key] = _Shared(config, mean_times(between), ends, nbytes, boundary_bytes(config))
        return self._layers[key]

    def _again(self, layout: Layout, config: Config) -> float:
        """The share of blocks whose forward runs again."""
        blocks, stages = config.model.num_layers, layout.pipeline_model_parallel_size * layout.chunks
        numbers = config.model.recompute_num_layers or (1,)
        if config.model.recompute_method != "block":
            return len(recomputed(config, range(1, blocks + 1), given_recompute(config.model)[0])) / blocks
        return min(1.0, sum(numbers) * (stages if len(numbers) == 1 else 1) / blocks)

    def elements(self, layout: Layout) -> dict[str, int]:
        """Family -> parameters that a rank would hold of all layers."""
        key = (layout.tensor_model_parallel_size, layout.expert_model_parallel_size, layout.expert_tensor_size)
        if key not in self._elements:
            config, whole = apply(self.config, layout), range(self.config.model.num_layers + 2)
            names = [copies.family for copies in families_of(config, self.world_size)]
            self._elements[key] = {name: stage_elements(config, whole, name) for name in names}
        return self._elements[key]

    def families(self, layout: Layout) -> list[tuple[float, Copies]]:
        """(Parameters of a mean stage on one rank, the ranks that hold the same ones) of each family."""
        p, tp = layout.pipeline_model_parallel_size, layout.tensor_model_parallel_size
        expert = layout.expert_tensor_size * layout.expert_model_parallel_size
        strides = {"dense": tp, "adapter": tp, "expert": expert}
        return [
            (number / p, Copies(name, self.world_size // p // strides[name], strides[name]))
            for name, number in self.elements(layout).items()
        ]

    def exact_memory(
        self, config: Config, cuts: list[range] | None = None, plan: MemoryPlan | None = None
    ) -> tuple[list[range], tuple[RankMemory, ...]]:
        """The stages of a legal layout, and the bytes of its pipeline ranks. cuts: instead of those of a run. plan:
        instead of what flags say."""
        run = PlannedStages.of(config, self.world_size, on_cpu=self.hardware.on_cpu, cuts=cuts, plan=plan)
        return run.cuts, pipeline_memory(run)

    def predict(self, config: Config, cuts: list[range], plan: MemoryPlan | None = None) -> Prediction:
        """The simulated step of a legal layout with these stages."""
        return predict(config, self.world_size, self.hardware, self.source, cuts, plan)

    def room(self, config: Config, cuts: list[range], plan: MemoryPlan | None = None) -> MemoryHeadroom:
        """The memory of a layout with these stages, rank by rank."""
        plan = given_plan(config) if plan is None else plan
        program, hw = program_of(config, self.world_size, plan), self.hardware
        return MemoryHeadroom(config, self.world_size, program, cuts, plan, hw.on_cpu, hw.usable_bytes)

    def least(self, sizes: Sizes, given: frozenset[str]) -> tuple[float, float]:
        """Bounds from below for all layouts of these sizes: no bubble and no messages of data parallelism, everything
        that may be sharded or recomputed is."""
        split = sizes.tensor > 1 and ("sequence_parallel" not in given or self.config.parallel.sequence_parallel)
        zero = self.config.parallel.zero_stage if "zero_stage" in given else 3
        kind = self.config.model.recompute_granularity if "recompute_granularity" in given else None
        schedule = default_schedule(None)
        layout = Layout(
            sizes.tensor, sizes.context, sizes.pipeline, None, split, schedule, zero, sizes.micro, kind,
            sizes.expert, sizes.expert_tensor,
        )  # fmt: skip
        shared = lean = self._shared(layout)
        if "recompute_granularity" not in given:
            lean = self._shared(replace(layout, recompute_granularity="full"))
        m = (self.config.training.global_batch_size or 1) // sizes.data // sizes.micro
        whole = self.config.model.num_layers * (shared.block.forward + shared.block.backward)
        return m * whole / sizes.pipeline, self._bytes(layout, lean.block_bytes, 1)

    def estimate(self, layout: Layout) -> tuple[float, float]:
        """(Seconds of a step, a lower bound of the bytes of the fullest rank)."""
        p, v = layout.pipeline_model_parallel_size, layout.chunks
        alike = self.world_size // (p * layout.tensor_model_parallel_size)  # ranks that sum gradients
        shared = self._shared(layout)
        block, again = shared.block, self._again(layout, shared.config)
        number = self.config.model.num_layers
        dp = alike // layout.context_parallel_size
        m = (self.config.training.global_batch_size or 1) // dp // layout.micro_batch_size
        schedule = find_schedule(layout.pipeline_schedule)
        again += schedule.recomputes
        forward, backward = block.forward, block.backward + again * block.forward
        whole = number * (forward + backward) + shared.ends
        rank = max(-(-number // (p * v)) * v * (forward + backward), whole / p)
        rank += 2 * v * self.hardware.action_overhead
        hop = CommGroup(self.hardware, p, layout.tensor_model_parallel_size * alike).send(shared.boundary)
        # idle time per rank, by the closed forms of the schedules' papers
        total = block.forward + block.backward_input + block.backward_weight
        part = rank / total if total else 0.0
        f, i, w = block.forward * part, block.backward_input * part, block.backward_weight * part
        step = m * rank + (p - 1) * schedule.idle(f, i, w, v) + 2 * (p - 1) * hop
        owned = sum(number / each.owners(layout.zero_stage) for number, each in self.families(layout))
        pair = 0.0
        if schedule.paired:  # every rank holds two stages, each with another rank
            group = CommGroup(self.hardware, 2, layout.tensor_model_parallel_size * alike)
            pair = group.all_reduce(2 * owned * self.size.gradient)
        step += pair + self._reduction(layout, 2 if schedule.paired else 1, rank, m)
        step += self.source.optimizer_step(shared.config, owned)
        return step, self._bytes(layout, shared.block_bytes, m)

    def _reduction(self, layout: Layout, stages: int, rank: float, m: int) -> float:
        """Seconds that sums of gradients, and gathers of weights, of so many stages add to a step."""
        size, overlap, on_cpu = self.size, self.hardware.overlap, self.hardware.on_cpu
        layers = max(1, stages * self.config.model.num_layers // layout.pipeline_model_parallel_size)
        held = []
        for number, each in self.families(layout):
            messages = layers if layout.zero_stage >= 2 else each.buckets(self.config, stages * number, on_cpu=on_cpu)
            held.append((stages * number, CommGroup(self.hardware, each.ranks, each.stride), messages))
        scatter = sum(group.gather(number * size.gradient, messages) for number, group, messages in held)
        gather = sum(group.gather(number * size.compute, messages) for number, group, messages in held)
        if layout.zero_stage == 0:
            reduced = sum(group.all_reduce(number * size.gradient, messages) for number, group, messages in held)
            return max(0.0, reduced - overlap * rank / 2)
        if layout.zero_stage < 3:
            scatters = m if layout.zero_stage == 2 else 1
            return scatters * max(0.0, scatter - overlap * rank / 2) + max(0.0, gather - overlap * rank / 3)
        times = 1 if find_schedule(layout.pipeline_schedule).gathers_once else m
        return m * max(0.0, scatter - overlap * rank / 3) + times * 2 * max(0.0, gather - overlap * rank / 3)

    def _bytes(self, layout: Layout, block_bytes: float, m: int) -> float:
        size, zero = self.size, layout.zero_stage
        moments = 2 * OPTIMIZER_SPECS[self.config.optimizer.optimizer].most_moments(self.config.optimizer)
        master = size.wide if size.wide != size.compute else 0
        given = given_plan(self.config)
        states = 0.0
        for number, each in self.families(layout):
            parts = [each.ranks if zero >= stage else 1 for stage in (1, 2, 3)]
            state = 0 if given.fraction else (master + moments) / parts[0]
            states += number * (state + size.gradient / parts[1] + size.compute / parts[2])
        p, v = layout.pipeline_model_parallel_size, layout.chunks
        schedule = find_schedule(layout.pipeline_schedule)
        early = 1 if schedule.recomputes else schedule.in_flight(ScheduleShape(p, m, v))
        blocks = self.config.model.num_layers // (p * v) * v
        states = 0.0 if given.hosts_params else states
        return 0.9 * (states + early * blocks * block_bytes)
