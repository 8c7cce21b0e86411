"""A step of a layout, before it runs: the simulator for the pipeline, messages and the optimizer step around it.

warm-up, steady state, drain          simulate(program, seconds per stage and action)
+ what data parallelism cannot hide   reduction behind the last backward, gathers behind the next forward
+ tied embeddings, norm, optimizer step
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add, attrgetter
from typing import Any

from megalite.config import Config
from megalite.inventory import DEFAULT_PLAN, MemoryPlan, boundary_bytes, computations, flops_per_iteration, model_layers
from megalite.planner.activations import recomputed
from megalite.planner.communication import CommGroup
from megalite.planner.cost import LayerTimes, Roofline, add_times
from megalite.planner.data_parallel import DataParallel
from megalite.planner.hardware import Hardware
from megalite.planner.host_states import host_seconds, host_traffic
from megalite.planner.memory import PlannedStages, RankMemory, pipeline_memory
from megalite.planner.software import Software
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
    simulate,
)

#: Above this many actions the simulator runs fewer micro-batches, and the steady state is continued.
SIMULATED_ACTIONS = 6_000


@dataclass(frozen=True)
class Prediction:
    """What one layout does."""

    config: Config
    world_size: int
    step_time: float
    bubble_over_ideal: float
    memory: tuple[RankMemory, ...]  # one entry per pipeline rank
    breakdown: dict[str, float]  # seconds of the step, by cause
    model_flops: float
    hardware_flops: float
    peak_flops: float
    plan: MemoryPlan
    offloaded_elements: float = 0.0  # parameters of a device whose optimizer states are off it
    messages: float = 0.0  # seconds of data parallelism's messages of a step
    open_messages: float = 0.0  # what of them computation does not hide

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
    """What a batch takes in the pipeline."""

    makespan: float  # seconds from the first forward to the last backward, or of a batch of one that never drains
    ends: tuple[float, ...]  # of each rank
    busy: float  # seconds of work of all ranks

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
    source: Roofline,
    cuts: list[range] | None = None,
    plan: MemoryPlan | None = None,
) -> Prediction:
    """Time and memory of a legal configuration with its vocabulary resolved; of a curriculum of lengths the mean step,
    weighted by iterations. plan: None: what flags say."""
    run = PlannedStages.of(config, world_size, on_cpu=hardware.on_cpu, cuts=cuts, plan=plan)
    program, cuts, plan = run.program, run.cuts, run.plan
    if config.training.seq_length_schedule is not None:
        phases = config.phases(world_size)
        each = [predict(config.at_length(length), world_size, hardware, source, cuts, plan) for length, _ in phases]
        return _mean(config, each, [iterations or 1 for _, iterations in phases])
    costs = _Stages(run, hardware, source.layers(config), source.software)
    steady = steady_state(config, program, costs.simulator_costs(), plan)
    m = config.num_microbatches(world_size)
    work = sum(times.forward + times.backward for times in costs.times)
    work += sum(costs.again(stage) for stage in program.recomputed)
    steady = replace(steady, busy=m * work)
    sums = costs.data_parallel
    reduce, gather = sums.around(costs.times, steady.ends, steady.makespan)
    elements = max(map(sums.owned_elements, range(program.num_ranks)))
    step = _optimizer_step(config, elements, hardware, source, steady.makespan, plan)
    step *= m if program.update_per_microbatch else 1
    batch = config.global_batch_size(world_size)
    seconds = {
        "pipeline": steady.makespan,
        "data_parallel": reduce + gather,
        "shared_weights": sums.tied() + sums.replicas(),
        "optimizer": step,
        "overhead": source.step_overhead(batch / config.data_parallel_size(world_size)),
    }
    tp = config.parallel.tensor_model_parallel_size
    flops = float(flops_per_iteration(config.model, batch, tp))
    twice_run = [cut if s in program.recomputed else costs.recomputed(s) for s, cut in enumerate(cuts)]
    again = [item for items in twice_run for item in items]
    twice = float(batch * config.model.seq_length * sum(model_layers(config.model)[item].flops() for item in again))
    return Prediction(
        config,
        world_size,
        step_time=sum(seconds.values()),
        bubble_over_ideal=steady.bubble_over_ideal,
        memory=pipeline_memory(run),
        breakdown=seconds,
        model_flops=flops,
        hardware_flops=flops + twice,
        peak_flops=hardware.matrix_flops[config.training.precision.name],
        plan=plan,
        offloaded_elements=plan.fraction * elements,
        messages=sums.messages(),
        open_messages=m * costs.open_messages() + reduce + gather,
    )


def _optimizer_step(
    config: Config, elements: float, hardware: Hardware, source: Roofline, meanwhile: float, plan: MemoryPlan
) -> float:
    """Seconds of a step of `elements` parameters: on the device what is there, then what is off it, as far as the
    `meanwhile` of the next batch does not hide that."""
    away = host_seconds(host_traffic(config, plan.fraction * elements, hardware, plan))
    if not away:
        return source.optimizer_step(config, elements)
    hidden = meanwhile if config.optimizer.offload.delayed_parameter_update else 0.0
    return source.optimizer_step(config, (1 - plan.fraction) * elements) + max(0.0, away - hidden)


def _mean(config: Config, each: Sequence[Prediction], weights: Sequence[int]) -> Prediction:
    """The mean step of phases with so many iterations, and the most memory."""

    def mean(value: Callable[[Prediction], float]) -> float:
        return sum(weight * value(one) for one, weight in zip(each, weights, strict=True)) / sum(weights)

    averaged = ("step_time", "bubble_over_ideal", "model_flops", "hardware_flops", "messages", "open_messages")
    means: dict[str, Any] = {name: mean(attrgetter(name)) for name in averaged}
    return replace(
        each[0],
        config=config,
        memory=tuple(max(rank, key=lambda one: one.total) for rank in zip(*(one.memory for one in each), strict=True)),
        breakdown={name: mean(lambda one: one.breakdown[name]) for name in each[0].breakdown},  # noqa: B023  # at once
        **means,
    )


def steady_state(config: Config, program: Program, costs: Costs, plan: MemoryPlan = DEFAULT_PLAN) -> SteadyState:
    """What the simulator finds, continued from fewer micro-batches where a batch is long."""
    p, m = program.num_ranks, program.num_microbatches
    each = 3 * program.num_stages * (max(map(len, program.chunks.sizes)) if program.chunks is not None else 1)
    actions = m * each
    unit = next(size for size in (2 * p, p, 1) if m % size == 0)  # what schedules divide a batch into
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

    run: PlannedStages
    hardware: Hardware
    layers: Sequence[LayerTimes]
    software: Software

    @property
    def config(self) -> Config:
        return self.run.config

    def recomputed(self, stage: int) -> range:
        """Blocks of a stage whose forward runs again in backward."""
        return recomputed(self.config, self.run.cuts[stage], self.run.plan.recompute_of(stage))

    @cached_property
    def data_parallel(self) -> DataParallel:
        return DataParallel(self.run, self.hardware)

    @cached_property
    def waits(self) -> tuple[LayerTimes, ...]:
        """What each stage waits for ZeRO's messages of every micro-batch."""
        return tuple(self.data_parallel.in_the_open(own, stage) for stage, own in enumerate(self.computed))

    @cached_property
    def times(self) -> tuple[LayerTimes, ...]:
        """F, I, W of one micro-batch of each stage, with recomputation and these messages."""
        return tuple(map(add, self.computed, self.waits))

    @cached_property
    def computed(self) -> tuple[LayerTimes, ...]:
        found = []
        over = self.hardware.action_overhead
        there, back = (self.exposed_hop(backward=backward) for backward in (False, True))
        for stage, cut in enumerate(self.run.cuts):
            again = add_times(self.layers[item] for item in self.recomputed(stage)).forward
            found.append(add_times(map(self._of_item, cut)) + LayerTimes(over + there, over + again + back, over))
        return tuple(found)

    def _of_item(self, item: int) -> LayerTimes:
        """Of embedding, block or head: on average over the micro-batches that reach it (partial backpropagation)."""
        times, groups = self.layers[item], self.config.training.partial_backprop_groups
        if groups == 1:
            return times
        blocks = len(self.layers) - 2
        group = next(g for g in range(groups) if g == groups - 1 or item - 1 >= blocks * (groups - 1 - g) // groups)
        share = (groups - group) / groups
        return LayerTimes(times.forward, *(share * each for each in times[1:]))

    def open_messages(self) -> float:
        """Seconds that a micro-batch waits for ZeRO's messages, on the rank that waits longest."""
        waits = [each.forward + each.backward for each in self.waits]
        stages = map(self.run.stages_of, range(self.run.program.num_ranks))
        return max(sum(waits[stage] for stage in own) for own in stages)

    def again(self, stage: int) -> float:
        """Seconds of R: the stage's forward once more, whose input is there."""
        return self.times[stage].forward - self.exposed_hop()

    def simulator_costs(self) -> Costs:
        program = self.run.program
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
        group, nbytes = CommGroup(self.hardware, pp, tp * self.data_parallel.dp), boundary_bytes(self.config)
        software = self.software
        whole = software.whole_stages or (backward and software.whole_gradients)
        each = max(1, software.waits)
        if whole or self.config.parallel.sequence_parallel:
            return each * group.send(nbytes)
        return each * group.send(nbytes / tp) + CommGroup(self.hardware, tp).gather(nbytes)

    def exposed_hop(self, *, backward: bool = False) -> float:
        """What of it each pass of a stage stands still for."""
        return self.hop(backward=backward) if self.software.waits and len(self.run.cuts) > 1 else 0.0
