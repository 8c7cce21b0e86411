"""The best layouts: closed forms rank all, the simulator prices the best.

all that may be legal ──> seconds and a lower bound of bytes by closed forms ──> what cannot fit is dropped
    ──> best first: is it legal, does it fit exactly ──> simulate the first ones, also with recomputation only where
    memory binds ──> other cuts for the best of them (uneven.py) ──> table, Pareto front
"""

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megalite.config import Config, StageLayout
from megalite.errors import ConfigError
from megalite.inventory import MemoryPlan
from megalite.planner.budget import within_budget
from megalite.planner.cost import Roofline
from megalite.planner.estimate import FastEstimator
from megalite.planner.float8 import float8_problems
from megalite.planner.hardware import Hardware
from megalite.planner.memory import RankMemory
from megalite.planner.predict import Prediction
from megalite.planner.search_space import Layout, apply, layout_of, of_shape, reasons_against, shapes
from megalite.planner.uneven import recompute_of, recomputing, recut, smallest_numbers
from megalite.progress import OnProgress, no_progress

LEAST_SIMULATED = 32  # simulated layouts: at least this many, whatever `top` is
BEST_SIZES, SIBLINGS = 2, 6  # of so many of the sizes that proved fastest, so many more are simulated
MOST_REJECTED = 100  # layouts that are counted exactly and do not fit before the search gives up
# This many of the fastest pipelines are cut anew, and this many of the fastest that do not fit.
RECUT, RECUT_MISFITS = 4, 2
LEAST_GAIN = 1e-3  # a cut is written out only if a step gains this part by it
# Steps whose predicted times differ by less than this part take equally long: the prediction is not that good.
AS_LONG = 2e-3
TOO_SLOW = 1.5  # sizes whose bound is this many times slower than the best estimate are left out


@dataclass(frozen=True)
class OverBudget:
    """A legal layout that does not fit."""

    config: Config
    memory: tuple[RankMemory, ...]  # one entry per pipeline rank

    @property
    def fullest(self) -> RankMemory:
        return max(self.memory, key=lambda memory: memory.total)


@dataclass(frozen=True)
class SearchResult:
    """What a search has found."""

    considered: int  # layouts that closed forms ranked
    predictions: tuple[Prediction, ...]  # those simulated that fit, fastest first
    rejected: tuple[OverBudget, ...]  # simulated or exactly counted ones that do not fit, least memory first
    problems: tuple[str, ...] = ()  # why nothing was legal


def search(
    config: Config,
    world_size: int,
    hardware: Hardware,
    source: Roofline,
    *,
    given: frozenset[str] = frozenset(),
    stale: bool = False,
    top: int = 10,
    even: bool = False,
    on_progress: OnProgress = no_progress,
) -> SearchResult:
    """The fastest layouts that fit.

    Args:
        config: with vocabulary and global batch size resolved.
        given: fields (of `space.SEARCHED`) that keep the value they have in `config`.
        stale: also schedules whose gradients are older than the weights (2BW, PipeDream).
        top: how many predictions are wanted.
        even: no other cuts than those that a run makes by itself.
        on_progress: called with percents.
    """
    quick = FastEstimator(config, world_size, hardware, source)
    ranked = _ranked(quick, given, stale, on_progress)
    ranked.sort(key=lambda item: (item[0], item[1], str(item[2])))
    fitting = [item for item in ranked if item[1] <= hardware.usable_bytes]
    wanted = max(LEAST_SIMULATED, top)
    predictions, rejected, why = _simulate(quick, _spread(fitting), wanted, given, on_progress)
    near = _siblings([item[2] for item in fitting], predictions)
    more, misfits, _ = _simulate(quick, near, len(near), given, on_progress)
    predictions, rejected = predictions + more, rejected + misfits
    if not predictions and not rejected:  # nothing may fit: the leanest, for the explanation
        lean = sorted(ranked, key=lambda item: item[1])[:60]
        predictions, rejected, why = _simulate(quick, [item[2] for item in lean], 3, given, on_progress)
    predictions += [] if even else _cut_anew(quick, predictions, rejected, given)
    predictions = _in_order(predictions)
    rejected.sort(key=lambda misfit: misfit.fullest.total)
    return SearchResult(len(ranked), tuple(predictions), tuple(rejected), tuple(why))


def _in_order(predictions: list[Prediction]) -> list[Prediction]:
    """Fastest first; of those that take as long as the fastest of them, the lowest ZeRO stage and least communication
    first, since what is hidden in a prediction can come into the open in a run."""
    left = sorted(predictions, key=lambda one: (one.step_time, one.memory_bytes))
    ordered: list[Prediction] = []
    while left:
        alike = [one for one in left if one.step_time <= left[0].step_time * (1 + AS_LONG)]
        ordered += sorted(alike, key=lambda one: (one.config.parallel.zero_stage, one.messages, one.step_time))
        left = left[len(alike) :]
    return ordered


def _ranked(
    quick: FastEstimator, given: frozenset[str], stale: bool, on_progress: OnProgress
) -> list[tuple[float, float, Layout]]:
    """(Seconds, lower bound of bytes, layout) of all that is worth a look."""
    ranked: list[tuple[float, float, Layout]] = []
    best = float("inf")
    usable = quick.hardware.usable_bytes
    sizes = sorted(shapes(quick.config, quick.world_size, given), key=lambda s: (s.micro, s.tensor * s.pipeline))
    for number, shape in enumerate(sizes):
        on_progress(50 * number / len(sizes), 100, f"{len(ranked):,} layouts estimated")
        seconds, nbytes = quick.least(shape, given)
        if ranked and (nbytes > 2 * usable or seconds > TOO_SLOW * best):
            continue
        plain = (0.0, 0.0)
        for layout in of_shape(quick.config, given, shape, stale=stale):
            seconds, nbytes = quick.estimate(layout)
            if layout.recompute_granularity is None:
                plain = (seconds, nbytes)
            elif layout.recompute_granularity == "full" and "recompute_granularity" not in given:
                # by its best form, which recomputes no more than the fullest rank needs
                least = min(1.0, max(0.0, plain[1] - usable) / max(1.0, plain[1] - nbytes))
                seconds = plain[0] + least * (seconds - plain[0])
            if nbytes <= usable:
                best = min(best, seconds)
            ranked.append((seconds, nbytes, layout))
    return ranked


def _spread(ranked: list[tuple[float, float, Layout]]) -> list[Layout]:
    """Fastest first, but after every three the next that needs less memory than all before, so that the Pareto front
    has more than its fast end, and after every two the fastest of sizes that have none yet: an estimate is several per
    cent off, and alike for layouts of the same sizes."""
    least, lean, seen, fresh = float("inf"), deque[Layout](), set[tuple[int, ...]](), deque[Layout]()
    for _, nbytes, layout in ranked:
        if nbytes < 0.9 * least:
            least = nbytes
            lean.append(layout)
        if layout.sizes not in seen:
            seen.add(layout.sizes)
            fresh.append(layout)
    order: dict[Layout, None] = {}
    for turn, (_, _, layout) in enumerate(ranked):
        order[layout] = None
        for others, due in ((fresh, turn % 2 == 1), (lean, turn % 3 == 2)):
            if others and due:
                order[others.popleft()] = None
    return list(order)


def _siblings(ranked: list[Layout], predictions: list[Prediction]) -> list[Layout]:
    """Of the sizes of the fastest predictions, the next layouts by their estimate that are not simulated yet."""
    tried = {layout_of(one.config) for one in predictions}
    best = [layout_of(one.config).sizes for one in _in_order(predictions)]
    found: list[Layout] = []
    for sizes in list(dict.fromkeys(best))[:BEST_SIZES]:
        left = (layout for layout in ranked if layout.sizes == sizes and layout not in tried)
        found += itertools.islice(left, SIBLINGS)
    return found


def _simulate(
    quick: FastEstimator, ordered: Iterable[Layout], wanted: int, given: frozenset[str], on_progress: OnProgress
) -> tuple[list[Prediction], list[OverBudget], list[str]]:
    """(What fits among the first ones, what does not, why nothing was legal)."""
    predictions: list[Prediction] = []
    rejected: list[OverBudget] = []
    why: list[str] = []
    simulated = 0
    for layout in ordered:
        share = max(simulated / wanted, len(rejected) / MOST_REJECTED)
        on_progress(50 + 50 * share, 100, f"{simulated} layouts simulated")
        config = apply(quick.config, layout)
        reasons = reasons_against(quick.config, quick.world_size, layout)
        reasons += [] if quick.hardware.on_cpu else float8_problems(config)
        if reasons:
            why = why if why and len(why) <= len(reasons) else reasons
            continue
        try:
            plan, cuts, memory = _placed(quick, config)
        except ConfigError as error:
            why = why or error.problems
            continue
        if max(rank.total for rank in memory) > quick.hardware.usable_bytes:
            rejected.append(OverBudget(config, memory))
        else:
            simulated += 1
            predictions.append(quick.predict(config, cuts, plan))
            if layout.recompute_granularity == "full" and _is_free(quick, layout, given):
                sparing = _where_memory_binds(quick, config, plan, cuts)
                predictions += [sparing] if sparing is not None else []
        if simulated >= wanted or len(rejected) >= MOST_REJECTED:
            break
    return predictions, rejected, why


def _placed(quick: FastEstimator, config: Config) -> tuple[MemoryPlan | None, list[range], tuple[RankMemory, ...]]:
    """The plan of a layout, its stages and memory; where a `--device-memory-budget-gb` is given, with what it puts on
    hosts and in files. Raises ConfigError where it is the host that has too little."""
    cuts, memory = quick.exact_memory(config)
    budget, folder = config.parallel.hardware.device_memory_budget_gb, config.optimizer.offload.optimizer_offload_path
    fits = max(rank.total for rank in memory) <= quick.hardware.usable_bytes
    if budget is None or (fits and folder is None):
        return None, cuts, memory
    try:
        placed = within_budget(config, quick.world_size, on_cpu=quick.hardware.on_cpu)
    except ConfigError:
        if fits:
            raise
        return None, cuts, memory
    return placed, *quick.exact_memory(config, plan=placed)


def _is_free(quick: FastEstimator, layout: Layout, given: frozenset[str]) -> bool:
    """Whether each stage may recompute a number of its own."""
    fixed = quick.config.parallel.pipeline_schedule_file is not None or layout.recompute_granularity == "selective"
    return "recompute_granularity" not in given and not fixed


def _where_memory_binds(
    quick: FastEstimator, config: Config, plan: MemoryPlan | None, cuts: list[range]
) -> Prediction | None:
    """The same layout with the fewest recomputed layers; None where that is all of them, or none."""
    room = quick.room(config, cuts, plan)
    numbers = smallest_numbers(room)
    if not numbers or not any(numbers) or numbers == room.blocks:
        return None
    plan = replace(room.plan, recompute=recompute_of(numbers, room.blocks))
    return quick.predict(recomputing(config, numbers, room.blocks), cuts, plan)


def _cut_anew(
    quick: FastEstimator, predictions: list[Prediction], rejected: list[OverBudget], given: frozenset[str]
) -> list[Prediction]:
    """Cuts by the costs of the layers: those that make a good pipeline faster, or that alone let a fast one fit."""
    parallel = quick.config.parallel
    if parallel.stage_layout != StageLayout():
        return []

    def shape(config: Config) -> Layout:
        layout = layout_of(config)
        return replace(layout, recompute_granularity=None) if _is_free(quick, layout, given) else layout

    times: dict[Layout, float] = {}
    for prediction in sorted(predictions, key=lambda prediction: prediction.step_time):
        times.setdefault(shape(prediction.config), prediction.step_time)
    tried = [layout for layout in times if layout.pipeline_model_parallel_size > 1][:RECUT]
    misfits = [shape(misfit.config) for misfit in rejected]
    misfits = [layout for layout in misfits if layout.pipeline_model_parallel_size > 1 and layout not in times]
    found = []
    for layout in dict.fromkeys(tried + misfits[:RECUT_MISFITS]):
        config, flexible = apply(quick.config, layout), _is_free(quick, layout, given)
        cuts, _ = quick.exact_memory(config)
        changed = recut(quick.room(config, cuts), quick.source.layers(config), flexible=flexible)
        if changed is None or changed[1] == cuts:
            continue
        _, memory = quick.exact_memory(*changed)
        if max(rank.total for rank in memory) > quick.hardware.usable_bytes:
            continue
        prediction = quick.predict(*changed)
        if prediction.step_time < times.get(layout, float("inf")) * (1 - LEAST_GAIN):
            found.append(prediction)
    return found


def pareto(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Those that no other beats in both time and memory, fastest first."""
    front: list[Prediction] = []
    for prediction in sorted(predictions, key=lambda p: (p.step_time, p.memory_bytes)):
        if not front or prediction.memory_bytes < front[-1].memory_bytes:
            front.append(prediction)
    return front
