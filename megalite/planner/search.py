"""The best layouts: closed forms rank all, the simulator prices the best.

all that may be legal ──> seconds and a lower bound of bytes by closed forms ──> what cannot fit is dropped
    ──> best first: is it legal, does it fit exactly ──> simulate the first ones, also with recomputation only where
    memory binds ──> other cuts for the best of them (uneven.py) ──> table, Pareto front
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from megalite.config import OPTIMIZER_SPECS, Config, StageLayout
from megalite.inventory import ElementBytes, boundary_bytes, stage_layer_ranges
from megalite.planner.activations import recomputed, stage_activations
from megalite.planner.communication import CommGroup
from megalite.planner.cost import LayerTimes, TimeSource, mean_times
from megalite.planner.hardware import Hardware
from megalite.planner.memory import RankMemory
from megalite.planner.model_states import stage_elements
from megalite.planner.predict import Prediction, memory_of, predict, program_of
from megalite.planner.search_space import Layout, Sizes, apply, layout_of, of_shape, reasons_against, shapes
from megalite.planner.uneven import MemoryHeadroom, recomputing, recut, smallest_numbers
from megalite.progress import OnProgress, untold
from megalite.schedule import ScheduleShape, default_schedule, find_schedule

#: Simulated layouts: at least this many, whatever `top` is.
LEAST_SIMULATED = 16

#: Layouts that are counted exactly and do not fit before the search gives up.
MOST_REJECTED = 100

#: This many of the fastest pipelines are cut anew, and this many of the fastest that do not fit.
RECUT, RECUT_MISFITS = 4, 2

#: A cut is written out only if a step gains this part by it.
LEAST_GAIN = 1e-3

#: Sizes whose bound is this many times slower than the best estimate are left out.
TOO_SLOW = 1.5


@dataclass(frozen=True)
class OverBudget:
    """A legal layout that does not fit. memory: one entry per pipeline rank."""

    config: Config
    memory: tuple[RankMemory, ...]

    @property
    def fullest(self) -> RankMemory:
        return max(self.memory, key=lambda memory: memory.total)


@dataclass(frozen=True)
class SearchResult:
    """considered: layouts that closed forms ranked. predictions: those simulated that fit, fastest first. rejected:
    the simulated or exactly counted ones that do not fit, least memory first. problems: why nothing was legal."""

    considered: int
    predictions: tuple[Prediction, ...]
    rejected: tuple[OverBudget, ...]
    problems: tuple[str, ...] = ()


class _Shared(NamedTuple):
    """Of layouts that compute the same. block: times of a mean block. ends: seconds of embedding and head together.
    block_bytes: the fewest that a mean block may keep. boundary: bytes of a message to the next stage."""

    config: Config
    block: LayerTimes
    ends: float
    block_bytes: float
    boundary: float


@dataclass
class FastEstimator:
    """Closed forms of seconds and bytes, with what layouts share computed once."""

    config: Config
    world_size: int
    hardware: Hardware
    source: TimeSource
    _layers: dict[tuple[int, int, int, bool, str | None], _Shared] = field(default_factory=dict)
    _elements: dict[int, int] = field(default_factory=dict)

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
        )
        if key not in self._layers:
            config = apply(self.config, layout)
            blocks = config.model.num_layers
            lean = config
            if config.model.recompute_method == "block":  # some stage may recompute all that it has
                lean = recomputing(config, [blocks], [blocks])
            kept = stage_activations(lean, range(1, blocks + 1), on_cpu=self.hardware.on_cpu)
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
            return len(recomputed(config, range(1, blocks + 1))) / blocks
        return min(1.0, sum(numbers) * (stages if len(numbers) == 1 else 1) / blocks)

    def elements(self, layout: Layout) -> int:
        """Parameters of the whole model on one tensor-parallel rank."""
        tp = layout.tensor_model_parallel_size
        if tp not in self._elements:
            whole = range(self.config.model.num_layers + 2)
            self._elements[tp] = stage_elements(apply(self.config, layout), whole)
        return self._elements[tp]

    def exact_memory(
        self, config: Config, cuts: list[range] | None = None
    ) -> tuple[list[range], tuple[RankMemory, ...]]:
        """The stages of a legal layout, and the bytes of its pipeline ranks. cuts: instead of those of a run."""
        program = program_of(config, self.world_size)
        cuts = stage_layer_ranges(config, program) if cuts is None else cuts
        return cuts, memory_of(config, self.world_size, self.hardware, program, cuts)

    def predict(self, config: Config, cuts: list[range]) -> Prediction:
        """The simulated step of a legal layout with these stages."""
        return predict(config, self.world_size, self.hardware, self.source, cuts)

    def room(self, config: Config) -> MemoryHeadroom:
        """The memory of a layout, rank by rank."""
        return MemoryHeadroom(config, self.world_size, self.hardware, program_of(config, self.world_size))

    def least(self, sizes: Sizes, given: frozenset[str]) -> tuple[float, float]:
        """Bounds from below for all layouts of these sizes: no bubble and no messages of data parallelism, everything
        that may be sharded or recomputed is."""
        split = sizes.tensor > 1 and ("sequence_parallel" not in given or self.config.parallel.sequence_parallel)
        zero = self.config.parallel.zero_stage if "zero_stage" in given else 3
        kind = self.config.model.recompute_granularity if "recompute_granularity" in given else None
        schedule = default_schedule(None)
        layout = Layout(sizes.tensor, sizes.context, sizes.pipeline, None, split, schedule, zero, sizes.micro, kind)
        shared = lean = self._shared(layout)
        if "recompute_granularity" not in given:
            lean = self._shared(replace(layout, recompute_granularity="full"))
        m = (self.config.training.global_batch_size or 1) // sizes.data // sizes.micro
        whole = self.config.model.num_layers * (shared.block.forward + shared.block.backward)
        elements = self.elements(layout) / sizes.pipeline
        return m * whole / sizes.pipeline, self._bytes(
            layout, elements, sizes.data * sizes.context, lean.block_bytes, 1
        )

    def estimate(self, layout: Layout) -> tuple[float, float]:
        """(Seconds of a step, a lower bound of the bytes of the fullest rank)."""
        p, v = layout.pipeline_model_parallel_size, layout.chunks
        alike = self.world_size // (p * layout.tensor_model_parallel_size)  # ranks that sum gradients
        shared = self._shared(layout)
        block, again = shared.block, self._again(layout, shared.config)
        number = self.config.model.num_layers
        dp = alike // layout.context_parallel_size
        m = (self.config.training.global_batch_size or 1) // dp // layout.micro_batch_size
        forward, backward = block.forward, block.backward + again * block.forward
        whole = number * (forward + backward) + shared.ends
        rank = max(-(-number // (p * v)) * v * (forward + backward), whole / p)
        rank += 2 * v * self.hardware.action_overhead
        hop = self._hop(layout, alike)
        step = m * rank + self._bubble(layout, rank, block, p, v, m) + 2 * (p - 1) * hop
        elements = self.elements(layout) / p
        step += self._data_parallel(layout, alike, elements, rank, m)
        step += self.source.optimizer_step(shared.config, elements / (alike if layout.zero_stage else 1))
        return step, self._bytes(layout, elements, alike, shared.block_bytes, m)

    def _hop(self, layout: Layout, dp: int) -> float:
        p, tp = layout.pipeline_model_parallel_size, layout.tensor_model_parallel_size
        return CommGroup(self.hardware, p, tp * dp).send(self._shared(layout).boundary)

    def _bubble(self, layout: Layout, rank: float, block: LayerTimes, p: int, v: int, m: int) -> float:
        """Idle time per rank, by the closed forms of the schedules' papers."""
        total = block.forward + block.backward_input + block.backward_weight
        third = rank / total if total else 0.0
        f, i, w = block.forward * third, block.backward_input * third, block.backward_weight * third
        return (p - 1) * find_schedule(layout.pipeline_schedule).idle(f, i, w, v)

    def _data_parallel(self, layout: Layout, dp: int, elements: float, rank: float, m: int) -> float:
        size = self.size
        if find_schedule(layout.pipeline_schedule).paired:  # every rank holds two stages, each with another rank
            pair = CommGroup(self.hardware, 2, layout.tensor_model_parallel_size * dp)
            sums = pair.all_reduce(2 * elements * size.gradient / (dp if layout.zero_stage else 1))
            return sums + self._reduction(layout, dp, 2 * elements, rank, m)
        return self._reduction(layout, dp, elements, rank, m)

    def _reduction(self, layout: Layout, dp: int, elements: float, rank: float, m: int) -> float:
        if dp == 1:
            return 0.0
        size, group = self.size, CommGroup(self.hardware, dp, layout.tensor_model_parallel_size)
        scatter, gather = group.gather(elements * size.gradient), group.gather(elements * size.compute)
        overlap = self.hardware.overlap
        if layout.zero_stage == 0:
            return max(0.0, group.all_reduce(elements * size.gradient) - overlap * rank / 2)
        if layout.zero_stage == 1:
            return max(0.0, scatter - overlap * rank / 2) + max(0.0, gather - overlap * rank / 3)
        if layout.zero_stage == 2:
            return m * max(0.0, scatter - overlap * rank / 2) + max(0.0, gather - overlap * rank / 3)
        times = 1 if find_schedule(layout.pipeline_schedule).gathers_once else m
        return m * max(0.0, scatter - overlap * rank / 3) + times * 2 * max(0.0, gather - overlap * rank / 3)

    def _bytes(self, layout: Layout, elements: float, dp: int, block_bytes: float, m: int) -> float:
        size, zero = self.size, layout.zero_stage
        moments = 2 * OPTIMIZER_SPECS[self.config.optimizer.optimizer].most_moments(self.config.optimizer)
        master = size.wide if size.wide != size.compute else 0
        offloaded = self.config.optimizer.offload.optimizer_cpu_offload
        state = 0 if offloaded else (master + moments) / (dp if zero else 1)
        per = size.compute / (dp if zero == 3 else 1) + size.gradient / (dp if zero >= 2 else 1) + state
        p, v = layout.pipeline_model_parallel_size, layout.chunks
        early = find_schedule(layout.pipeline_schedule).in_flight(ScheduleShape(p, m, v))
        blocks = self.config.model.num_layers // (p * v) * v
        return 0.9 * (elements * per + early * blocks * block_bytes)


def search(
    config: Config,
    world_size: int,
    hardware: Hardware,
    source: TimeSource,
    *,
    given: frozenset[str] = frozenset(),
    stale: bool = False,
    top: int = 10,
    even: bool = False,
    on_progress: OnProgress = untold,
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
    if not predictions and not rejected:  # nothing may fit: the leanest, for the explanation
        lean = sorted(ranked, key=lambda item: item[1])[:60]
        predictions, rejected, why = _simulate(quick, [item[2] for item in lean], 3, given, on_progress)
    predictions += [] if even else _cut_anew(quick, predictions, rejected, given)
    predictions.sort(key=lambda prediction: (prediction.step_time, prediction.memory_bytes))
    rejected.sort(key=lambda misfit: misfit.fullest.total)
    return SearchResult(len(ranked), tuple(predictions), tuple(rejected), tuple(why))


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
    """Fastest first, but after every three the next one that needs less memory than all before: so that the Pareto
    front has more than its fast end."""
    least, lean = float("inf"), []
    for _, nbytes, layout in ranked:
        if nbytes < 0.9 * least:
            least = nbytes
            lean.append(layout)
    order: dict[Layout, None] = {}
    for turn, (_, _, layout) in enumerate(ranked):
        order[layout] = None
        if turn % 3 == 2 and lean:
            order[lean.pop(0)] = None
    return list(order)


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
        if reasons:
            why = why if why and len(why) <= len(reasons) else reasons
            continue
        cuts, memory = quick.exact_memory(config)
        if max(rank.total for rank in memory) > quick.hardware.usable_bytes:
            rejected.append(OverBudget(config, memory))
        else:
            simulated += 1
            predictions.append(quick.predict(config, cuts))
            if layout.recompute_granularity == "full" and _is_free(quick, layout, given):
                sparing = _where_memory_binds(quick, config, cuts)
                predictions += [quick.predict(sparing, cuts)] if sparing else []
        if simulated >= wanted or len(rejected) >= MOST_REJECTED:
            break
    return predictions, rejected, why


def _is_free(quick: FastEstimator, layout: Layout, given: frozenset[str]) -> bool:
    """Whether each stage may recompute a number of its own."""
    fixed = quick.config.parallel.pipeline_schedule_file is not None or layout.recompute_granularity == "selective"
    return "recompute_granularity" not in given and not fixed


def _where_memory_binds(quick: FastEstimator, config: Config, cuts: list[range]) -> Config | None:
    """The same layout with the fewest recomputed layers; None where that is all of them, or none."""
    room = quick.room(config)
    numbers = smallest_numbers(room, cuts)
    blocks = [room.blocks(cut) for cut in cuts]
    return recomputing(config, numbers, blocks) if numbers and any(numbers) and list(numbers) != blocks else None


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
        changed = recut(quick.room(config), quick.source.layers(config), flexible=flexible)
        if changed is None or changed[1] == quick.exact_memory(config)[0]:
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
