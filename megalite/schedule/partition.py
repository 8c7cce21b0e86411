"""Partition: which layers of the model each stage holds. Pure: it cuts a list of costs.

The model is the list [embedding, layer 0, ..., layer L-1, head]: L + 2 items, and a stage is a slice of it.

    L=6, 4 stages, head as heavy as two layers      E t t | t t | t t | L        (written `Ett|tt|tt|L`)

Without instructions the heaviest stage is made as light as possible, and among such cuts the most even one is taken;
uneven layer counts are balanced, not refused. Instructions: `--decoder-first-pipeline-num-layers` and
`--decoder-last-pipeline-num-layers` fix the layers of the first and the last rank; Megatron's
`--pipeline-model-parallel-layout` fixes everything.

Invariant: the slices are the whole list, in order, without gap or overlap; no layer is ever lost.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise, starmap
from statistics import median

from megalite.errors import ScheduleError
from megalite.schedule.stage_placement import StagePlacement

LEAST_GAIN = 0.05  # part of the slowest stage's time that another division must save to be named


def _slices(sizes: Sequence[int], num_layers: int) -> list[range]:
    """Slices of these sizes of the list [embedding, layers..., head], which has num_layers + 2 items."""
    assert sum(sizes) == num_layers + 2, f"{sizes} loses layers of {num_layers}"
    assert min(sizes) > 0, f"empty stage in {sizes}"
    return list(starmap(range, pairwise([0, *accumulate(sizes)])))


def partition(
    num_layers: int,
    placement: StagePlacement,
    *,
    costs: Sequence[float] | None = None,
    first: int | None = None,
    last: int | None = None,
    layout: str | None = None,
) -> list[range]:
    """Stage -> indices into [embedding, layers..., head]: num_layers transformer layers, cut into the stages of
    `placement`.

    costs: num_layers + 2 relative costs, embedding first, head last (default: layers 1, embedding and head 0).
    first, last: transformer layers of the first and last rank. layout: Megatron's string, which excludes first and
    last. Raises ScheduleError with the flag and the numbers if the instructions do not fit the model.
    """
    num_stages = placement.num_stages
    if layout is not None:
        if first is not None or last is not None:
            raise ScheduleError(
                f"`pipeline_model_parallel_layout`={layout}: it already fixes every stage; leave out "
                "`decoder_first_pipeline_num_layers` and `decoder_last_pipeline_num_layers`"
            )
        return parse_layout(layout, num_layers, num_stages)
    if first is not None or last is not None:
        return _fixed_ends(num_layers, placement, first, last)
    if num_layers + 2 < num_stages:
        raise ScheduleError(
            f"`pipeline_model_parallel_size`={placement.num_ranks}: {num_stages} stages for {num_layers} layers, "
            f"embedding and head; use at most {num_layers + 2} stages, or more layers"
        )
    costs = (0.0, *[1.0] * num_layers, 0.0) if costs is None else tuple(float(cost) for cost in costs)
    assert len(costs) == num_layers + 2 and min(costs) >= 0, costs
    return _slices(_balanced(costs, num_stages), num_layers)


@lru_cache(maxsize=256)
def _balanced(costs: tuple[float, ...], num_stages: int) -> tuple[int, ...]:
    """Sizes of contiguous slices with the least maximum; among those the least sum of squares, earliest cuts first."""
    total = [0.0, *accumulate(costs)]
    n = len(costs)
    if num_stages == 1:
        return (n,)
    heaviest = _least_maximum(total, num_stages)
    limit = heaviest + 1e-9 * max(total[-1], 1.0)
    infinity = float("inf")
    # best[i] = least sum of squares for the items i.. in the stages that remain; from the last stage to the first.
    best = [infinity] * n + [0.0]
    cuts: list[list[int]] = []
    for behind in range(1, num_stages + 1):
        following, best, cut = best, [infinity] * (n + 1), [n] * (n + 1)
        # Not more may stand before the stage than its predecessors hold, nor from it on than these stages.
        most = 1.000001 * limit * (num_stages - behind)
        least = total[-1] - 1.000001 * limit * behind
        for start in range(bisect_left(total, least, 0, n), bisect_right(total, most, 0, n)):
            for stop in range(start + 1, n + 1):
                load = total[stop] - total[start]
                if load > limit:
                    break
                value = load * load + following[stop]
                # Later cuts win ties: a surplus layer goes to an earlier stage, and the embedding joins its first
                # layers.
                if value <= best[start] and value < infinity:
                    best[start], cut[start] = value, stop
        cuts.append(cut)
    sizes, start = [], 0
    for cut in reversed(cuts):
        sizes.append(cut[start] - start)
        start = cut[start]
    return tuple(sizes)


def _least_maximum(total: Sequence[float], num_stages: int) -> float:
    """Least possible cost of the heaviest of num_stages non-empty slices. total: prefix sums."""
    n = len(total) - 1
    least = [total[-1] - before for before in total]
    for behind in range(1, num_stages):
        following, least = least, [float("inf")] * (n + 1)
        for start in range(n - behind):
            # A longer slice weighs more and leaves less to the stages behind it: the best is where the two cross.
            stop = bisect_left(
                range(n - behind), True, start + 1, key=lambda stop: total[stop] - total[start] >= following[stop]
            )
            least[start] = min(
                max(total[at] - total[start], following[at]) for at in (stop - 1, stop) if start < at <= n - behind
            )
    return least[0]


def _fixed_ends(num_layers: int, placement: StagePlacement, first: int | None, last: int | None) -> list[range]:
    """The first and last rank get what the flags say, the others the rest, evenly, with earlier ranks first."""
    p = placement.num_ranks
    ends = (("`decoder_first_pipeline_num_layers`", first), ("`decoder_last_pipeline_num_layers`", last))
    flags = " ".join(f"{flag}={count}" for flag, count in ends if count is not None)
    fixed = {rank: count for rank, count in ((0, first), (p - 1, last)) if count is not None}
    if p == 1 and first is not None and last is not None and first != last:
        raise ScheduleError(f"{flags}: with one pipeline rank, the first and the last rank are the same; leave one out")
    free = [rank for rank in range(p) if rank not in fixed]
    rest = num_layers - sum(fixed.values())
    if min(fixed.values()) < 0 or rest < 0 or (rest > 0 and not free):
        raise ScheduleError(
            f"{flags}: {sum(fixed.values())} layers on the end ranks and {rest} for {len(free)} ranks between them; "
            f"the sum must be `num_layers`={num_layers}"
        )
    per_rank = fixed | {rank: rest // len(free) + (turn < rest % len(free)) for turn, rank in enumerate(free)}
    counts = [0] * placement.num_stages
    for rank, count in per_rank.items():
        stages = sorted(stage for stage, replica in placement.stages_of(rank) if replica == 0)
        for turn, stage in enumerate(stages):
            counts[stage] = count // len(stages) + (turn < count % len(stages))
    return partition_of(num_layers, counts, flags)


def partition_of(num_layers: int, counts: Sequence[int], flags: str = "stages") -> list[range]:
    """Stages with these numbers of transformer layers; the embedding joins the first, the head the last.

    flags: what asks for them, for the message. Raises ScheduleError.
    """
    sizes = list(counts)
    sizes[0] += 1
    sizes[-1] += 1
    if 0 in sizes:
        raise ScheduleError(f"{flags}: stage {sizes.index(0)} would hold no layer; use fewer stages, or more layers")
    return _slices(sizes, num_layers)


def full_layout(cuts: Sequence[range]) -> str:
    """Megatron's layout string: `Ett|tt|ttL`. cuts: as `partition` gives them."""
    names = ["E", *"t" * (cuts[-1].stop - 2), "L"]
    return "|".join("".join(names[cut.start : cut.stop]) for cut in cuts)


def compact_layout(cuts: Sequence[range]) -> str:
    """The same with repetitions, as `parse_layout` reads it: `Et*5|(t*6|)*14t*5L`."""
    texts = full_layout(cuts).split("|")
    stages = ["".join(_times(letter, len(list(run))) for letter, run in groupby(text)) for text in texts]
    parts = [f"{stage}|" for stage in stages[:-1]] + stages[-1:]
    return "".join(_times(part, len(list(run))) for part, run in groupby(parts))


def who_holds(cuts: Sequence[range], placement: StagePlacement) -> list[str]:
    """Rank -> what it holds, in words: `embedding, 2 layers`; of several stages `6 + 6 layers`."""
    head, words = cuts[-1].stop - 1, []
    for rank in range(placement.num_ranks):
        own = [cuts[stage] for stage in sorted({stage for stage, _ in placement.stages_of(rank)})]
        counts = [sum(0 < item < head for item in cut) for cut in own]
        layers = " + ".join(str(count) for count in counts if count)
        parts = ["embedding"] if any(0 in cut for cut in own) else []
        parts += [f"{layers} layer{'s' * (layers != '1')}"] if layers else []
        parts += ["head"] if any(head in cut for cut in own) else []
        words.append(", ".join(parts))
    return words


def division_text(cuts: Sequence[range], placement: StagePlacement) -> str:
    """Megatron's letters and the same in words: `Et*2|L: rank 0 embedding, 2 layers | rank 1 head`; ranks beside each
    other that hold as much are named together."""
    parts, rank = [], 0
    for words, run in groupby(who_holds(cuts, placement)):
        last = rank + len(list(run)) - 1
        parts.append(f"rank {rank} {words}" if last == rank else f"ranks {rank} to {last} {words} each")
        rank = last + 1
    return f"{compact_layout(cuts)}: {' | '.join(parts)}"


def faster_division(cuts: Sequence[range], seconds: Sequence[float], weights: Sequence[float]) -> list[range] | None:
    """The division whose slowest stage is fastest by measured times, where it gains a twentieth; else None.

    A layer is as long as the stages say that hold nothing else; where there are none, as long as the shares of all
    stages allow at most. What that leaves of the ends is embedding and head. Too long a layer makes a stage that
    receives one too slow here, so what is named is faster by these times.

    seconds: of each stage's work. weights: of each layer, relative to each other.
    """
    heavy = [sum(weights[item - 1] for item in cut if 0 < item <= len(weights)) for cut in cuts]
    units = [work / weight for work, weight in zip(seconds, heavy, strict=True) if weight]
    between = [work / weight for work, weight in [*zip(seconds, heavy, strict=True)][1:-1] if weight]
    unit = min(min(units), median(between)) if between else min(units)
    ends = [max(0.0, seconds[at] - unit * heavy[at]) for at in (0, -1)]
    costs = (ends[0], *(unit * weight for weight in weights), ends[1])
    found = _slices(_balanced(costs, len(cuts)), len(weights))
    slowest = max(sum(costs[cut.start : cut.stop]) for cut in found)
    return found if slowest < (1 - LEAST_GAIN) * max(seconds) else None


def _times(part: str, number: int) -> str:
    if number == 1:
        return part
    return f"{part}*{number}" if len(part) == 1 else f"({part})*{number}"


def parse_layout(layout: str, num_layers: int, num_stages: int) -> list[range]:
    """Megatron's layout string: `|` ends a stage, `E` embedding, `t` layer, `L` head, `x*3` and `(..)*3` repeat, commas
    are air.

    `Et*3|(tt|)*29,t|L` is 32 stages. Layers of multi-token prediction, m, are on the stage of L here, before it. Raises
    ScheduleError if it does not hold exactly this model in this many stages.
    """
    flag = f"`pipeline_model_parallel_layout`={layout}"
    stages = expand_layout(layout).split("|")
    problems = []
    if len(stages) != num_stages:
        problems.append(
            f"{len(stages)} stages, but pipeline ranks times chunks per rank are {num_stages}; change the "
            f"layout or `pipeline_model_parallel_size` and `virtual_pipeline_model_parallel_size`"
        )
    stages[-1] = re.sub("m*L$", "L", stages[-1])
    if "m" in "".join(stages):
        problems.append("m, a layer of multi-token prediction, shares the stage of L here; write mL at the end")
        stages = [stage.replace("m", "") for stage in stages]
    if "" in stages:
        problems.append(f"stage {stages.index('')} holds no layer; give each stage one, or use fewer stages")
    whole = "".join(stages)
    if whole != "E" + "t" * num_layers + "L":
        problems.append(
            f"holds {whole.count('E')} embeddings, {whole.count('t')} layers and {whole.count('L')} heads; the "
            f"model is E, then `num_layers`={num_layers} times t, then L, in this order"
        )
    if problems:
        raise ScheduleError(f"{flag}: {'; also, '.join(problems)}")
    return _slices([len(stage) for stage in stages], num_layers)


def expand_layout(layout: str) -> str:
    """Repetitions written out, innermost first; only E, t, m, L and | are left. Raises ScheduleError."""
    flag = f"`pipeline_model_parallel_layout`={layout}"
    text = re.sub(r"[\s,]", "", layout)
    pattern = re.compile(r"(?:\(([EtmL|]*)\)|([EtmL|]))\*(\d+)|\(([EtmL|]*)\)")
    while match := pattern.search(text):
        group, single, count, plain = match.groups()
        body = plain if plain is not None else (group if group is not None else single) * int(count)
        text = text[: match.start()] + body + text[match.end() :]
        if len(text) > 100_000:
            raise ScheduleError(f"{flag}: more than 100000 layers when written out")
    if wrong := re.search(r"[^EtmL|]", text):
        raise ScheduleError(
            f"{flag}: cannot read {wrong[0]!r}; the letters are E t m L | ( ) * and commas, as in Et*3|(tt|)*2,tL"
        )
    return text
