"""A step of a layout, before it runs: the simulator for the pipeline, messages and the optimizer step around it.

warm-up, steady state, drain          simulate(program, seconds per stage and action)
+ what data parallelism cannot hide   reduction behind the last backward, gathers behind the next forward
+ tied embeddings, norm, optimizer step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megalite.config import Config
from megalite.inventory import (
    DEFAULT_PLAN,
    ElementBytes,
    MemoryPlan,
    boundary_bytes,
    bucket_limit,
    computations,
    flops_per_iteration,
    given_plan,
    model_layers,
    stage_layer_ranges,
)
from megalite.planner.activations import recomputed
from megalite.planner.communication import CommGroup, Copies, families_of, stage_elements
from megalite.planner.cost import LayerTimes, TimeSource, add_times, precision_name
from megalite.planner.hardware import Hardware
from megalite.planner.host_params import with_weight_chunks
from megalite.planner.host_states import host_traffic
from megalite.planner.memory import RankMemory, pipeline_memory
from megalite.planner.software import MEGALITE, Software
from megalite.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    EVICT,
    FORWARD,
    PREFETCH,
    RECOMPUTE,
    Costs,
    Program,
    find_schedule,
    simulate,
)

#: Above this many actions the simulator runs fewer micro-batches, and the steady state is continued.
SIMULATED_ACTIONS = 6_000


@dataclass(frozen=True)
class Prediction:
    """What one layout does. memory: one entry per pipeline rank. breakdown: seconds of the step, by cause.
    offloaded_elements: parameters of a device whose optimizer states are off it."""

    config: Config
    world_size: int
    step_time: float
    bubble_over_ideal: float
    memory: tuple[RankMemory, ...]
    breakdown: dict[str, float]
    model_flops: float
    hardware_flops: float
    peak_flops: float
    plan: MemoryPlan
    offloaded_elements: float = 0.0

    @property
    def fullest(self) -> int:
        """The pipeline rank that needs most memory."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def memory_bytes(self) -> float:
        """Of the fullest rank."""
        return self.memory[self.fullest].total

    @property
    def tokens_per_s(self) -> float:
        return self.config.global_batch_size(self.world_size) * self.config.model.seq_length / self.step_time

    @property
    def tflops_per_device(self) -> float:
        """Model FLOPs, Megatron's convention."""
        return self.model_flops / self.step_time / self.world_size / 1e12

    @property
    def hardware_tflops_per_device(self) -> float:
        """With what is recomputed."""
        return self.hardware_flops / self.step_time / self.world_size / 1e12

    @property
    def mfu(self) -> float:
        return self.tflops_per_device * 1e12 / self.peak_flops


@dataclass(frozen=True)
class SteadyState:
    """makespan: seconds from the first forward to the last backward, or of a batch of a pipeline that never drains.

    ends: of each rank. busy: seconds of work of all ranks.
    """

    makespan: float
    ends: tuple[float, ...]
    busy: float

    @property
    def bubble_over_ideal(self) -> float:
        return len(self.ends) * self.makespan / self.busy - 1 if self.busy else 0.0


def program_of(config: Config, world_size: int, plan: MemoryPlan = DEFAULT_PLAN) -> Program:
    """The computations of a full batch, as they run. plan: whose rooms it keeps to."""
    return computations(config, config.num_microbatches(world_size), plan=plan)


def predict(
    config: Config,
    world_size: int,
    hardware: Hardware,
    source: TimeSource,
    cuts: Sequence[range] | None = None,
    plan: MemoryPlan | None = None,
) -> Prediction:
    """Time and memory of a legal configuration with its vocabulary resolved; of a curriculum of lengths the mean step,
    weighted by iterations. plan: None: what flags say."""
    cuts = stage_layer_ranges(config, program_of(config, world_size)) if cuts is None else cuts
    plan = with_weight_chunks(config, world_size, cuts, given_plan(config) if plan is None else plan)
    program = program_of(config, world_size, plan)
    if config.training.seq_length_schedule is not None:
        phases = config.phases(world_size)
        each = [predict(config.at_length(length), world_size, hardware, source, cuts, plan) for length, _ in phases]
        return _mean(config, each, [iterations or 1 for _, iterations in phases])
    memory = pipeline_memory(config, world_size, program, cuts, plan, on_cpu=hardware.on_cpu)
    software = getattr(source, "software", MEGALITE)
    costs = _Stages(config, world_size, hardware, source.layers(config), cuts, plan, software)
    steady = steady_state(config, program, costs.simulator_costs(program), plan)
    m = config.num_microbatches(world_size)
    work = sum(times.forward + times.backward for times in costs.times)
    work += sum(costs.again(stage) for stage in program.recomputed)
    steady = replace(steady, busy=m * work)
    reduce, gather = costs.reduction(program, steady)
    elements = max(costs.rank_elements(program, rank, owned=True) for rank in range(program.num_ranks))
    step = _optimizer_step(config, elements, hardware, source, steady.makespan, plan)
    step *= m if program.update_per_microbatch else 1
    batch = config.global_batch_size(world_size)
    seconds = {
        "pipeline": steady.makespan,
        "data_parallel": reduce + gather,
        "shared_weights": costs.tied() + costs.replicas(program),
        "optimizer": step,
        "overhead": source.step_overhead(batch / config.data_parallel_size(world_size)),
    }
    tp = config.parallel.tensor_model_parallel_size
    flops = float(flops_per_iteration(config.model, batch, tp))
    twice_run = [cut if s in program.recomputed else costs.recomputed(s) for s, cut in enumerate(cuts)]
    again = [item for items in twice_run for item in items]
    twice = float(batch * config.model.seq_length * sum(model_layers(config.model)[item].flops() for item in again))
    peak = hardware.matrix_flops[precision_name(config)]
    total = sum(seconds.values())
    away = plan.fraction * elements
    bubble = steady.bubble_over_ideal
    return Prediction(config, world_size, total, bubble, memory, seconds, flops, flops + twice, peak, plan, away)


def _optimizer_step(
    config: Config, elements: float, hardware: Hardware, source: TimeSource, meanwhile: float, plan: MemoryPlan
) -> float:
    """Seconds of a step of `elements` parameters: on the device what is there, then what is off it, as far as the
    `meanwhile` of the next batch does not hide that."""
    away = host_traffic(config, plan.fraction * elements, hardware, plan).seconds
    if not away:
        return source.optimizer_step(config, elements)
    hidden = meanwhile if config.optimizer.offload.delayed_parameter_update else 0.0
    return source.optimizer_step(config, (1 - plan.fraction) * elements) + max(0.0, away - hidden)


def _mean(config: Config, each: Sequence[Prediction], weights: Sequence[int]) -> Prediction:
    """The mean step of phases with so many iterations, and the most memory."""

    def mean(value: Callable[[Prediction], float]) -> float:
        return sum(weight * value(one) for one, weight in zip(each, weights, strict=True)) / sum(weights)

    return Prediction(
        config,
        each[0].world_size,
        mean(lambda one: one.step_time),
        mean(lambda one: one.bubble_over_ideal),
        tuple(max(ranks, key=lambda rank: rank.total) for ranks in zip(*(one.memory for one in each), strict=True)),
        {name: mean(lambda one: one.breakdown[name]) for name in each[0].breakdown},  # noqa: B023  # used at once
        mean(lambda one: one.model_flops),
        mean(lambda one: one.hardware_flops),
        each[0].peak_flops,
        each[0].plan,
        each[0].offloaded_elements,
    )


def steady_state(config: Config, program: Program, costs: Costs, plan: MemoryPlan = DEFAULT_PLAN) -> SteadyState:
    """What the simulator finds, continued from fewer micro-batches where a batch is long."""
    p, m = program.num_ranks, program.num_microbatches
    each = 3 * program.num_stages * (max(map(len, program.chunks.sizes)) if program.chunks is not None else 1)
    actions = m * each
    unit = p if m % p == 0 else 1
    unit = unit * 2 if unit % 2 and m % 2 == 0 else unit
    fewer = max(3 * p, SIMULATED_ACTIONS // each)
    skipped = (m - fewer) // unit * unit
    fixed = config.parallel.pipeline_schedule_file is not None
    if actions <= SIMULATED_ACTIONS or skipped < unit or fixed or m - skipped - unit < 2 * p:
        return _simulated(program, costs)
    long = _simulated(computations(config, m - skipped, plan=plan), costs)
    short = _simulated(computations(config, m - skipped - unit, plan=plan), costs)
    rate = (long.makespan - short.makespan) / unit
    ends = tuple(end + rate * skipped for end in long.ends)
    return SteadyState(long.makespan + rate * skipped, ends, long.busy / (m - skipped) * m)


def _simulated(program: Program, costs: Costs) -> SteadyState:
    if not program.asynchronous:
        timeline = simulate(program, costs)
        ends = [0.0] * program.num_ranks
        for span in timeline.spans:
            ends[span.rank] = max(ends[span.rank], float(span.end))
        return SteadyState(float(timeline.makespan), tuple(ends), float(sum(timeline.busy_per_rank)))
    runs = [simulate(program, costs, batches=count, global_norm=True) for count in (2, 4)]
    period = float(runs[1].makespan - runs[0].makespan) / 2
    busy = float(sum(runs[1].busy_per_rank) - sum(runs[0].busy_per_rank)) / 2
    return SteadyState(period, (period,) * program.num_ranks, busy)


@dataclass(frozen=True)
class _Stages:
    """Seconds of the stages of one layout."""

    config: Config
    world_size: int
    hardware: Hardware
    layers: Sequence[LayerTimes]
    cuts: Sequence[range]
    plan: MemoryPlan
    software: Software = MEGALITE

    def recomputed(self, stage: int) -> range:
        """Blocks of a stage whose forward runs again in backward."""
        return recomputed(self.config, self.cuts[stage], self.plan.recompute_of(stage))

    @property
    def dp(self) -> int:
        """Ranks whose gradients of a stage's dense parameters are summed."""
        return self.config.gradient_ranks(self.world_size)

    @cached_property
    def families(self) -> tuple[Copies, ...]:
        return families_of(self.config, self.world_size)

    def shard_group(self, copies: Copies) -> CommGroup:
        return CommGroup(self.hardware, copies.shards, copies.stride)

    @cached_property
    def times(self) -> tuple[LayerTimes, ...]:
        """F, I, W of one micro-batch of each stage, with recomputation and ZeRO's traffic of every micro-batch."""
        return tuple(self._stage_times(stage) for stage in range(len(self.cuts)))

    def _stage_times(self, stage: int) -> LayerTimes:
        total = add_times(self.layers[item] for item in self.cuts[stage])
        again = add_times(self.layers[item] for item in self.recomputed(stage)).forward
        over = self.hardware.action_overhead
        there, back = (self.exposed_hop(backward=backward) for backward in (False, True))
        total += LayerTimes(over + there, over + again + back, over)
        return self._with_zero(total, stage)

    def _with_zero(self, times: LayerTimes, stage: int) -> LayerTimes:
        zero, overlap = self.config.parallel.zero_stage, self.hardware.overlap
        if zero < 2:
            return times
        size = ElementBytes.of(self.config)
        groups = [(self.shard_group(copies), self.elements[copies.family][stage]) for copies in self.families]
        scatter = sum(group.gather(number * size.gradient) for group, number in groups)
        held = [(self.shard_group(self.families[0]), stage_elements(self.config, self.cuts[stage], "frozen")), *groups]
        weights = sum(group.gather(number * size.compute) for group, number in held) if zero == 3 else 0.0
        if zero == 3 and find_schedule(self.config.parallel.schedule).gathers_once:
            weights /= max(1, self.config.num_microbatches(self.world_size))
        hide = overlap if self.config.parallel.overlap_param_gather else 0.0
        forward = max(0.0, weights - hide * times.forward)
        hide = overlap if self.config.parallel.overlap_grad_reduce else 0.0
        backward = max(0.0, weights + scatter - hide * times.backward)
        return times + LayerTimes(forward, backward)

    def again(self, stage: int) -> float:
        """Seconds of R: the stage's forward once more, whose input is there."""
        return self.times[stage].forward - self.exposed_hop()

    def simulator_costs(self, program: Program) -> Costs:
        exact: dict[tuple[int, str], float] = {}
        for stage, times in enumerate(self.times):
            exact[stage, FORWARD] = times.forward
            exact[stage, BACKWARD] = times.backward
            exact[stage, BACKWARD_INPUT] = times.backward_input
            exact[stage, BACKWARD_WEIGHT] = times.backward_weight
            exact[stage, RECOMPUTE] = self.again(stage)
            if program.room is not None:
                seconds = self.hardware.host_transfer(program.room.full[stage])
                exact |= {(stage, EVICT): seconds, (stage, PREFETCH): seconds}
            if program.chunks is not None:  # what a backward sends to the host, and fetches from there, is beside it
                link = max(self.hardware.host_transfer(nbytes) for nbytes in program.chunks.gradients[stage])
                exact |= {(stage, kind): max(exact[stage, kind], link) for kind in (BACKWARD, BACKWARD_WEIGHT)}
        byte = self.hardware.host_transfer(1)
        return Costs(communication=0.0 if self.software.waits else self.hop(), host_byte=byte, exact=exact)

    def hop(self, *, backward: bool = False) -> float:
        """Seconds of a message to the next stage, or of a gradient to the one before."""
        tp, pp = self.config.parallel.tensor_model_parallel_size, self.config.parallel.pipeline_model_parallel_size
        group, nbytes = CommGroup(self.hardware, pp, tp * self.dp), boundary_bytes(self.config)
        software = self.software
        whole = software.whole_stages or (backward and software.whole_gradients)
        each = max(1, software.waits)
        if whole or self.config.parallel.sequence_parallel:
            return each * group.send(nbytes)
        return each * group.send(nbytes / tp) + CommGroup(self.hardware, tp).gather(nbytes)

    def exposed_hop(self, *, backward: bool = False) -> float:
        """What of it each pass of a stage stands still for."""
        return self.hop(backward=backward) if self.software.waits and len(self.cuts) > 1 else 0.0

    @cached_property
    def elements(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters of each stage on one rank, by family."""
        names = [copies.family for copies in self.families]
        return {name: tuple(stage_elements(self.config, cut, name) for cut in self.cuts) for name in names}

    def family_elements(self, program: Program, rank: int, copies: Copies) -> int:
        return sum(self.elements[copies.family][stage] for stage, _ in program.placement.stages_of(rank))

    def rank_elements(self, program: Program, rank: int, *, owned: bool = False) -> float:
        """All parameters of a rank; owned: those whose optimizer state it has."""
        zero = self.config.parallel.zero_stage if owned else 0
        return sum(self.family_elements(program, rank, each) / each.owners(zero) for each in self.families)

    def reduction(self, program: Program, steady: SteadyState) -> tuple[float, float]:
        """Seconds of the step that gradients and updated weights of data parallelism add."""
        parallel, size = self.config.parallel, ElementBytes.of(self.config)
        zero = parallel.zero_stage
        if all(each.ranks == 1 for each in self.families):
            return 0.0, 0.0
        late, slowest = 0.0, 0.0
        for rank in range(program.num_ranks):
            stages = [stage for stage, _ in program.placement.stages_of(rank)]
            take, number = self._reduce(program, rank)
            share = self.hardware.overlap * (1 - 1 / number) if parallel.overlap_grad_reduce else 0.0
            window = share * min(self.times[stage].backward for stage in stages)
            if program.asynchronous:  # hidden behind the forwards of the next batch, which wait only for themselves
                window = self.hardware.overlap * max(0.0, steady.makespan - steady.makespan / program.num_microbatches)
            late = max(late, steady.ends[rank] + max(0.0, take - window))
            back = sum(
                self.shard_group(each).gather(self.family_elements(program, rank, each) * size.compute)
                for each in self.families
                if zero in (1, 2)
            )
            hide = self.hardware.overlap if parallel.overlap_param_gather else 0.0
            slowest = max(slowest, back - hide * sum(self.times[stage].forward for stage in stages))
        return max(0.0, late - steady.makespan), slowest

    def _reduce(self, program: Program, rank: int) -> tuple[float, int]:
        """(Seconds in which the gradients of a rank are summed over the copies of each family, messages)."""
        parallel, size = self.config.parallel, ElementBytes.of(self.config)
        zero, seconds, messages = parallel.zero_stage, 0.0, 0
        for each in self.families:
            overlap = parallel.overlap_grad_reduce
            bucket = bucket_limit(parallel.ddp_bucket_size, each.shards, on_cpu=self.hardware.on_cpu, overlap=overlap)
            elements, group = self.family_elements(program, rank, each), self.shard_group(each)
            nbytes = elements * size.gradient
            seconds += group.all_reduce(nbytes) if zero == 0 else group.gather(nbytes) if zero == 1 else 0.0
            copies = CommGroup(self.hardware, each.ranks // each.shards, each.stride * each.shards)
            seconds += copies.all_reduce(nbytes / each.owners(zero))
            messages += math.ceil(elements / bucket) if bucket else min(1, elements)
        return seconds, max(1, messages)

    def replicas(self, program: Program) -> float:
        """The sum over the ranks that hold the same stage (Chimera), in the open after the last backward."""
        if program.placement.num_replicas == 1:
            return 0.0
        parallel, size = self.config.parallel, ElementBytes.of(self.config).gradient
        group = CommGroup(self.hardware, program.placement.num_replicas, parallel.tensor_model_parallel_size * self.dp)
        ranks = range(program.num_ranks)
        return max(group.all_reduce(self.rank_elements(program, rank, owned=True) * size) for rank in ranks)

    def tied(self) -> float:
        """The sum of the embedding's two gradients, where it is on two stages."""
        model, parallel = self.config.model, self.config.parallel
        if model.untie_embeddings_and_output_weights or parallel.pipeline_model_parallel_size == 1:
            return 0.0
        rows = self.config.padded_vocab_size() / parallel.tensor_model_parallel_size
        stride = parallel.tensor_model_parallel_size * self.dp * (parallel.pipeline_model_parallel_size - 1)
        nbytes = rows * model.hidden_size * ElementBytes.of(self.config).gradient
        return CommGroup(self.hardware, 2, stride).all_reduce(nbytes)
