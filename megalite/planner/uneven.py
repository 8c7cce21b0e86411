"""Stages that differ: recomputation where memory binds, and cuts by the costs of layers under a memory bound.

In 1F1B rank r of p holds the activations of p - r micro-batches, so memory binds the first ranks. To recompute every
layer everywhere pays for what only they need::

    p=4, 6 layers a stage, usable memory 10         holds        recomputes    numbers
                                                    rank 0  14   4 layers      --recompute-method block
                                                    rank 1  11   1             --recompute-num-layers 4 1 0 0
                                                    rank 2   8   0
                                                    rank 3   5   0

The slowest stage sets the pace, so layers then move from stages that recompute to stages that do not. A stage of k
layers costs the seconds of its layers, of the embedding or the head where it has them, and of the fewest recomputed
layers with which it fits; the cut with the least slowest stage is found over all ways to deal the layers.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from megalite.config import Config, StageLayout
from megalite.inventory import Layer, Recompute, blocks_of, model_layers
from megalite.planner.activations import recomputed
from megalite.planner.cost import LayerTimes, add_times
from megalite.planner.memory import PlannedStages, rank_memory
from megalite.schedule import compact_layout, partition_of

SPREAD = 2  # a stage between the ends may have this many layers more or fewer than the mean, or a third of the mean


def recompute_of(numbers: Sequence[int], blocks: Sequence[int]) -> tuple[Recompute, ...]:
    """That stage s of blocks[s] layers recomputes numbers[s] of them, in its shortest form."""
    if not any(numbers):
        return (Recompute(),)
    if list(numbers) == list(blocks):
        return (Recompute("uniform", 1),)
    return tuple(Recompute("block", number) for number in (numbers[:1] if len(set(numbers)) == 1 else numbers))


def recomputing(config: Config, numbers: Sequence[int], blocks: Sequence[int]) -> Config:
    """The configuration whose flags say so."""
    given = recompute_of(numbers, blocks)
    model = replace(
        config.model,
        recompute_granularity="full" if given[0].method else None,
        recompute_method=given[0].method or None,
        recompute_num_layers=tuple(each.number for each in given) if given[0].method else None,
    )
    return replace(config, model=model)


@dataclass(frozen=True)
class MemoryHeadroom(PlannedStages):
    """Stages whose ranks are asked one by one whether they fit."""

    usable_bytes: float = 0.0  # of a device

    @cached_property
    def blocks(self) -> list[int]:
        """Transformer layers of each stage."""
        return [len(blocks_of(self.config.model, cut)) for cut in self.cuts]

    def fits(self, rank: int, numbers: Sequence[int] | None) -> bool:
        """Whether the stages of `rank` fit. numbers: recomputed layers of each stage; None: the plan's."""
        plan = self.plan
        if numbers is not None:
            plan = replace(plan, recompute=recompute_of(numbers, self.blocks))
        return rank_memory(replace(self, plan=plan), rank).total <= self.usable_bytes


def smallest_numbers(room: MemoryHeadroom) -> list[int] | None:
    """The fewest recomputed layers of each stage with which every rank fits; None: not even all are enough."""
    numbers, ranks = [0] * len(room.cuts), range(room.program.num_ranks)
    for rank in ranks:
        found = _fewest(room, rank, numbers, _deals(sorted(room.stages_of(rank)), room.blocks))
        if found is None:
            return None
        numbers = found
    if room.program.placement.num_replicas > 1:  # a later rank may have changed a stage that an earlier one holds too
        return numbers if all(room.fits(rank, numbers) for rank in ranks) else None
    return numbers


def _deals(stages: Sequence[int], blocks: Sequence[int]) -> list[dict[int, int]]:
    """For every total of recomputed layers of a rank: stage -> its part, in proportion to its layers."""
    whole = sum(blocks[stage] for stage in stages)
    deals = []
    for total in range(whole + 1):
        deal = {stage: blocks[stage] * total // max(1, whole) for stage in stages}
        for stage in stages:
            deal[stage] += sum(deal.values()) < total and deal[stage] < blocks[stage]
        deals.append(deal)
    return deals


def _fewest(
    room: MemoryHeadroom, rank: int, numbers: Sequence[int], deals: Sequence[Mapping[int, int]]
) -> list[int] | None:
    """`numbers`, raised to the first of `deals` with which `rank` fits."""

    def raised(index: int) -> list[int]:
        return [max(number, deals[index].get(stage, 0)) for stage, number in enumerate(numbers)]

    def fits(index: int) -> bool:
        return room.fits(rank, raised(index))

    index = 0 if fits(0) else bisect_left(range(len(deals)), True, lo=1, key=fits)
    return raised(index) if index < len(deals) else None


def recut(room: MemoryHeadroom, times: Sequence[LayerTimes], *, flexible: bool) -> tuple[Config, list[range]] | None:
    """The configuration with the cut whose slowest stage is fastest among those that fit, and its stages.

    Args:
        times: of each layer of [embedding, block 0, ..., head].
        flexible: recomputation is free to choose as well.
    """
    number, stages = room.config.model.num_layers, room.program.num_stages
    mean = number / stages
    spread = max(SPREAD, round(mean / 3))
    whole = model_layers(room.config.model)
    between = range(max(1, int(mean) - spread), min(number, int(mean) + 1 + spread) + 1)
    ends = range(between.stop)
    known: dict[tuple[int, int, tuple[Layer, ...]], float | None] = {}  # the same layers inside of one rank's stages

    @cache
    def seconds(stage: int, begin: int, count: int) -> float | None:
        end = stage if stage in (0, stages - 1) else -1
        key = (end, room.program.placement.rank_of(stage), whole[begin + 1 : begin + count + 1])
        if key not in known:
            known[key] = _seconds(room, times, stage, begin, count, flexible)
        return known[key]

    counts = deal([ends if stage in (0, stages - 1) else between for stage in range(stages)], seconds, number)
    if counts is None:
        return None
    cuts = partition_of(number, counts)
    parallel = replace(
        room.config.parallel, stage_layout=StageLayout(pipeline_model_parallel_layout=compact_layout(cuts))
    )
    config = replace(room.config, parallel=parallel)
    if flexible:
        numbers = smallest_numbers(replace(room, cuts=cuts))
        if numbers is None:
            return None
        config = recomputing(config, numbers, counts)
    return config, cuts


def _seconds(
    room: MemoryHeadroom, times: Sequence[LayerTimes], stage: int, begin: int, count: int, flexible: bool
) -> float | None:
    """Of one micro-batch in a stage of `count` layers from `begin` on (the rank's others as long), if it fits."""
    stages, last = room.program.num_stages, room.config.model.num_layers + 1
    rank = room.program.placement.rank_of(stage)

    def items(index: int, blocks: int) -> range:
        head = range(last - blocks, last + 1)
        return range(0, blocks + 1) if index == 0 else head if index == stages - 1 else range(1, blocks + 1)

    cuts = [items(index, max(1, count)) for index in range(stages)]
    cuts[stage] = range(begin + (stage > 0), begin + count + 1 + (stage == stages - 1))
    room = replace(room, cuts=cuts)
    if flexible:
        own = [(index, room.blocks[index]) for index in room.stages_of(rank)]
        deals = [{index: min(number, blocks) for index, blocks in own} for number in range(count + 1)]
        found = _fewest(room, rank, [0] * stages, deals)
        if found is None:
            return None
        again = range(begin + 1, begin + 1 + found[stage])
    elif not room.fits(rank, None):
        return None
    else:
        again = recomputed(room.config, cuts[stage], room.plan.recompute_of(stage))
    here = add_times(times[item] for item in cuts[stage])
    return here.forward + here.backward + add_times(times[item] for item in again).forward


def deal(
    options: Sequence[Sequence[int]], seconds: Callable[[int, int, int], float | None], total: int
) -> list[int] | None:
    """Counts of layers, one a stage, that sum to `total`: the least slowest stage, then the most even.

    Args:
        options: stage -> its possible counts. seconds: (stage, its first layer, its count) -> seconds; None: does not
            fit.
    """
    limit = _least(options, seconds, total, max)[0].get(total)
    if limit is None:
        return None

    def within(stage: int, begin: int, count: int) -> float | None:
        value = seconds(stage, begin, count)
        return value if value is not None and value <= limit * (1 + 1e-9) else None

    _, choices = _least(options, within, total, lambda value, rest: value * value + rest)
    counts, rest = [], total
    for choice in choices:
        counts.append(choice[rest])
        rest -= choice[rest]
    return counts


def _least(
    options: Sequence[Sequence[int]],
    seconds: Callable[[int, int, int], float | None],
    total: int,
    joined: Callable[[float, float], float],
) -> tuple[dict[int, float], list[dict[int, int]]]:
    """(Layers left -> least joined value of all stages, for every stage: layers left -> its count)."""
    best: dict[int, float] = {0: 0.0}
    choices: list[dict[int, int]] = []
    for stage in reversed(range(len(options))):
        found: dict[int, float] = {}
        choice: dict[int, int] = {}
        for rest, value in best.items():
            for count in options[stage]:
                left = rest + count
                if left > total or (stage == 0 and left < total):
                    continue
                own = seconds(stage, total - left, count)
                if own is not None and (left not in found or joined(own, value) < found[left]):
                    found[left], choice[left] = joined(own, value), count
        best = found
        choices.append(choice)
    return best, choices[::-1]
