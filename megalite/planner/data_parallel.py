"""What data parallelism adds to a step: sums of gradients, gathers of weights, and what of them nothing hides.

Messages run beside computation at the `overlap` of the hardware, each as soon as what it carries is there. So two
never hide: the last sum of gradients, whose backward is the last thing that a batch computes, and the first gather of
weights, which the first forward waits for. Every message pays the latency of its ring, which grows with the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megalite.config import Config
from megalite.inventory import ALIGNMENT, ElementBytes
from megalite.planner.communication import CommGroup, Copies, families_of, stage_elements
from megalite.planner.cost import LayerTimes
from megalite.planner.float8 import rounded_elements
from megalite.planner.hardware import Hardware
from megalite.planner.memory import PlannedStages
from megalite.schedule import find_schedule


class LayerMessages(NamedTuple):
    """Seconds of the messages that ZeRO 2 and 3 send in every pass of a stage, a message a layer: gathers of its
    weights, in a forward or a backward, and scatters of its gradients."""

    gather: float
    scatter: float
    layers: int


@dataclass(frozen=True)
class DataParallel:
    """Seconds of the messages between the ranks that hold the same parameters."""

    run: PlannedStages
    hardware: Hardware

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def dp(self) -> int:
        """Ranks whose gradients of a stage's dense parameters are summed."""
        return self.config.gradient_ranks(self.run.world_size)

    @cached_property
    def size(self) -> ElementBytes:
        return ElementBytes.of(self.config)

    @cached_property
    def families(self) -> tuple[Copies, ...]:
        return families_of(self.config, self.run.world_size)

    def shard_group(self, copies: Copies) -> CommGroup:
        return CommGroup(self.hardware, copies.shards, copies.stride)

    @cached_property
    def elements(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters of each stage on one rank, by family."""
        names = [copies.family for copies in self.families]
        return {name: tuple(stage_elements(self.config, cut, name) for cut in self.run.cuts) for name in names}

    def family_elements(self, rank: int, copies: Copies) -> int:
        return sum(self.elements[copies.family][stage] for stage in self.run.stages_of(rank))

    def owned_elements(self, rank: int) -> float:
        """Parameters whose optimizer state a rank has."""
        zero = self.config.parallel.zero_stage
        return sum(self.family_elements(rank, each) / each.owners(zero) for each in self.families)

    def of_pass(self, stage: int) -> LayerMessages:
        """What every micro-batch sends at ZeRO 2 and 3."""
        zero, layers = self.config.parallel.zero_stage, max(1, len(self.run.cuts[stage]))
        if zero < 2:
            return LayerMessages(0.0, 0.0, layers)
        groups = [(copies, self.elements[copies.family][stage]) for copies in self.families]
        scatter = sum(self._scatter(copies, number, layers) for copies, number in groups)
        held = [(self.families[0], stage_elements(self.config, self.run.cuts[stage], "frozen")), *groups]
        gather = sum(self._gather(copies, number, layers) for copies, number in held) if zero == 3 else 0.0
        if self.config.gathers_float8:
            (group,) = (self.shard_group(copies) for copies in self.families if copies.family == "dense")
            whole = self.elements["dense"][stage] * self.size.compute
            less = rounded_elements(self.config, self.run.cuts[stage]) * (self.size.compute - 1)
            gather += group.gather(whole - less, layers) - group.gather(whole, layers)
        if zero == 3 and find_schedule(self.config.parallel.schedule).gathers_once:
            gather /= max(1, self.config.num_microbatches(self.run.world_size))
        return LayerMessages(gather, scatter, layers)

    def _gather(self, copies: Copies, elements: int, layers: int) -> float:
        """Seconds of the weights of a pass (ZeRO-3), on average over the passes of a step."""
        given, group, numel = self.config.parallel.zero_plus_plus, self.shard_group(copies), self.size.compute
        sent = 1 + 2 * numel / ALIGNMENT if given.zero_quantized_weights else numel
        first = group.gather(elements * sent, layers)
        if given.zero_hpz_partition_size == 1 or copies.shards == 1:
            return first
        near = CommGroup(self.hardware, given.zero_hpz_partition_size, copies.stride)
        passes = 2 * max(1, self.config.num_microbatches(self.run.world_size))
        return (first + (passes - 1) * near.gather(elements * numel, layers)) / passes

    def _scatter(self, copies: Copies, elements: int, layers: int) -> float:
        """Seconds of the gradients of a backward."""
        given, numel = self.config.parallel.zero_plus_plus, self.size.gradient
        if not given.zero_quantized_gradients or copies.shards == 1:
            return self.shard_group(copies).gather(elements * numel, layers)
        place, sent = given.zero_hpz_partition_size, elements * (1 / 2 + numel / ALIGNMENT)
        near = CommGroup(self.hardware, place, copies.stride)
        far = CommGroup(self.hardware, copies.shards // place, copies.stride * place)
        return near.gather(sent, layers) + far.gather(sent / place, layers)

    def in_the_open(self, times: LayerTimes, stage: int) -> LayerTimes:
        """What of them a forward and a backward of these times do not hide."""
        parallel, overlap, messages = self.config.parallel, self.hardware.overlap, self.of_pass(stage)
        hide = overlap if parallel.overlap_param_gather else 0.0
        forward = max(0.0, messages.gather - hide * times.forward)
        hide = overlap if parallel.overlap_grad_reduce else 0.0
        backward = max(0.0, messages.gather + messages.scatter - hide * times.backward)
        return LayerTimes(forward, backward)

    def around(self, times: Sequence[LayerTimes], ends: Sequence[float], makespan: float) -> tuple[float, float]:
        """Seconds of a step behind its last backward, and before its first forward.

        times: of a micro-batch of each stage. ends: of the ranks' last backwards.
        """
        parallel, program = self.config.parallel, self.run.program
        if all(each.ranks == 1 for each in self.families):
            return 0.0, 0.0
        late, slowest = 0.0, 0.0
        for rank in range(program.num_ranks):
            stages = self.run.stages_of(rank)
            take, back, number = self._of_a_step(rank)
            share = self.hardware.overlap * (1 - 1 / number) if parallel.overlap_grad_reduce else 0.0
            window = share * min(times[stage].backward for stage in stages)
            passes = [self.of_pass(stage) for stage in stages]
            scatters = parallel.overlap_grad_reduce * max(each.scatter / each.layers for each in passes)
            last = 0.0 if program.asynchronous else take / number + scatters
            if program.asynchronous:  # hidden behind the forwards of the next batch, which wait only for themselves
                window = self.hardware.overlap * max(0.0, makespan - makespan / program.num_microbatches)
            late = max(late, ends[rank] + max(last, take - window))
            hide = self.hardware.overlap if parallel.overlap_param_gather else 0.0
            first = back / number + parallel.overlap_param_gather * max(each.gather / each.layers for each in passes)
            first = 0.0 if program.asynchronous else first
            slowest = max(slowest, first, back - hide * sum(times[stage].forward for stage in stages))
        return max(0.0, late - makespan), slowest

    def _of_a_step(self, rank: int) -> tuple[float, float, int]:
        """(Seconds in which the gradients of a rank are summed over the copies of each family, in which ZeRO 1 and 2
        gather what the step has updated, messages of either)."""
        zero, sums, gathers, messages = self.config.parallel.zero_stage, 0.0, 0.0, 0
        for each in self.families:
            elements, group = self.family_elements(rank, each), self.shard_group(each)
            nbytes = elements * self.size.gradient
            number = each.buckets(self.config, elements, on_cpu=self.hardware.on_cpu)
            if zero < 2:
                sums += group.gather(nbytes, number) if zero else group.all_reduce(nbytes, number)
            copies = CommGroup(self.hardware, each.ranks // each.shards, each.stride * each.shards)
            sums += copies.all_reduce(nbytes / each.owners(zero), number)
            gathers += group.gather(elements * self.size.compute, number) if zero in (1, 2) else 0.0
            messages += number
        return sums, gathers, max(1, messages)

    def messages(self) -> float:
        """Seconds of all messages of a step, hidden or not, of the rank that has most."""
        most = 0.0
        for rank in range(self.run.program.num_ranks):
            passes = map(self.of_pass, self.run.stages_of(rank))
            each = sum(2 * one.gather + one.scatter for one in passes) * self.run.program.num_microbatches
            sums, gathers, _ = self._of_a_step(rank)
            most = max(most, each + sums + gathers)
        return most

    def replicas(self) -> float:
        """The sum over the ranks that hold the same stage (Chimera), in the open after the last backward."""
        program = self.run.program
        if program.placement.num_replicas == 1:
            return 0.0
        stride = self.config.parallel.tensor_model_parallel_size * self.dp
        group = CommGroup(self.hardware, program.placement.num_replicas, stride)
        return max(group.all_reduce(self.owned_elements(r) * self.size.gradient) for r in range(program.num_ranks))

    def tied(self) -> float:
        """The sum of the embedding's two gradients, where it is on two stages."""
        model, parallel = self.config.model, self.config.parallel
        if not model.shares_embedding or parallel.pipeline_model_parallel_size == 1:
            return 0.0
        rows = self.config.padded_vocab_size() / parallel.tensor_model_parallel_size
        stride = parallel.tensor_model_parallel_size * self.dp * (parallel.pipeline_model_parallel_size - 1)
        nbytes = rows * model.hidden_size * self.size.gradient
        return CommGroup(self.hardware, 2, stride).all_reduce(nbytes)
