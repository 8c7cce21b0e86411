"""Bytes on one rank, term by term: what the start-up table prints and what the search prunes with.

    weights gradients master moments        the flat buffers, to the byte (model_states.py)
    activations                             of all micro-batches in flight at the fullest moment (activations.py)
    boundary                                inputs of stages that wait for their backward, a message each way
    logits                                  what the head keeps, and one chunk of logits
    buffers                                 scratch of ZeRO-2 and 3, gathered layers of ZeRO-3, gathered sequences
    workspace                               what comes and goes in the backward of one block, or in the optimizer's step
                                            where that is more than all that a batch needs (step_bytes.py)

Not in it: what the driver and the libraries take for themselves (a number of the hardware file).
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cache
from typing import Self

from megalite.config import Config
from megalite.inventory import (
    ElementBytes,
    MemoryPlan,
    boundary_bytes,
    computations,
    first_alike,
    given_plan,
    micro_tokens,
    stage_layer_ranges,
)
from megalite.planner.activations import (
    PRODUCT_WORKSPACE,
    StageActivations,
    stage_activations,
    warm_up_bytes,
    workspace_bytes,
)
from megalite.planner.float8 import gathered_bytes, kept_bytes
from megalite.planner.host_params import with_weight_chunks
from megalite.planner.model_states import StateBytes, state_bytes
from megalite.planner.peaks import STEPPED, memory_peaks, walked
from megalite.schedule import ChunkTraffic, Program, Residency, chunk_traffic, residency

#: A batch with more actions than this is not walked; the schedule's declared peak is taken instead.
WALKED_ACTIONS = 20_000
UNFINISHED_SENDS = 16  # messages that gloo sends at a time (`comm.p2p`)


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank while it trains."""

    weights: float = 0.0
    gradients: float = 0.0
    master: float = 0.0
    moments: float = 0.0
    activations: float = 0.0
    boundary: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    workspace: float = 0.0
    warm_up: float = 0.0  # of micro-batches before blocks became graphs, with torch's allocator
    host: float = 0.0  # in the memory of the node, not on the device
    file: float = 0.0  # on a disk

    @property
    def model_states(self) -> float:
        """Weights, gradients and optimizer state: what lives from step to step."""
        return self.weights + self.gradients + self.master + self.moments

    @property
    def optimizer(self) -> float:
        """Masters and moments."""
        return self.master + self.moments

    @property
    def total(self) -> float:
        """Everything on the device."""
        return float(sum(getattr(self, name) for name in TERMS))

    def by_term(self) -> dict[str, int]:
        """Term -> bytes, with the total."""
        return {name: round(getattr(self, name)) for name in TERMS} | {"total": round(self.total)}


TERMS = tuple(field.name for field in fields(RankMemory) if field.name not in ("host", "file"))


@dataclass(frozen=True)
class PlannedStages:
    """A model as a layout divides it."""

    config: Config  # with its vocabulary resolved
    world_size: int
    program: Program  # schedule of a full batch
    cuts: list[range]  # stage -> indices into [embedding, block 0, ..., head]
    plan: MemoryPlan  # where memory lies
    on_cpu: bool = False
    _: KW_ONLY
    held: Sequence[StateBytes] | None = None  # by ranks that were built, pipeline coordinate by coordinate
    # length of sequences -> of each stage what each of its blocks, which ran, keeps of a micro-batch
    kept: Mapping[int, Sequence[Sequence[int]]] | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        world_size: int,
        *,
        on_cpu: bool,
        cuts: list[range] | None = None,
        plan: MemoryPlan | None = None,
    ) -> Self:
        """As flags say it, or with these stages, or this plan."""
        number = config.num_microbatches(world_size)
        cuts = stage_layer_ranges(config, computations(config, number)) if cuts is None else cuts
        plan = with_weight_chunks(config, world_size, cuts, given_plan(config) if plan is None else plan)
        return cls(config, world_size, computations(config, number, plan=plan), cuts, plan, on_cpu)

    def stages_of(self, rank: int) -> list[int]:
        """What a rank at this pipeline coordinate holds."""
        return [stage for stage, _ in self.program.placement.stages_of(rank)]


def rank_memory(run: PlannedStages, rank: int) -> RankMemory:
    """Bytes on a rank at pipeline coordinate `rank`, at the length of sequences that needs most."""
    program, cuts, plan, on_cpu, stages = run.program, run.cuts, run.plan, run.on_cpu, run.stages_of(rank)
    config, world_size = run.config.of_stage(stages[0], run.world_size)
    run = replace(run, config=config, world_size=world_size)
    if config.training.seq_length_schedule is not None:
        lengths = dict(config.phases(world_size))
        phases = [rank_memory(replace(run, config=config.at_length(length)), rank) for length in lengths]
        return max(phases, key=lambda memory: memory.total)
    states = _states(run, rank)
    again = {stage: plan.recompute_of(stage) for stage in stages}
    ran = {} if run.kept is None else dict(enumerate(run.kept[config.model.seq_length]))
    kept = {s: stage_activations(config, cuts[s], how, on_cpu=on_cpu, ran=ran.get(s)) for s, how in again.items()}
    spaces = {stage: workspace_bytes(config, cuts[stage], how, on_cpu=on_cpu) for stage, how in again.items()}
    logits = max(space[0] for space in spaces.values())
    # What the head keeps of a micro-batch is gone before the backward of the blocks of its stage begins.
    block = max(space[1] - kept[stage].head * (space[0] > 0) for stage, space in spaces.items())
    full, boundary, head, transient = _peak(program, rank, kept, max(logits, block))
    host = float(states.host + states.staging)
    if any(each.moved for each in kept.values()):
        peaks = memory_peaks(program, rank)
        host += max(sum(count * kept[stage].moved for stage, count, *_ in peak.counts) for peak in peaks)
    if program.room is not None:
        held = moved(program, rank)
        full, host = max(0.0, held.device - head), host + held.host
    coming = weights_moved(program, rank).peak if program.chunks is not None else 0
    messages = _messages(program, rank, on_cpu=on_cpu) * boundary_bytes(config)
    gradients = float(states.gradients)
    lanes = full if config.parallel.hardware.cuda_graph_impl != "none" else 0.0  # activations that stay
    comes = not (program.keeps_gradients or program.chunks is not None or lanes)
    if config.parallel.zero_stage >= 2 and comes:  # as activations go
        gradients = max(0.0, gradients - full - boundary - head)
    beside = _kept_by_step(program, rank, kept) + lanes + messages + shared_memory_bytes(config, on_cpu)
    return _planned(
        states,
        beside,
        weights=states.weights + coming,
        gradients=gradients,
        activations=full,
        boundary=boundary + messages,
        logits=head + logits,
        buffers=states.scratch + states.gathered + _buffers(config, on_cpu),
        workspace=max(0.0, transient - logits),  # the head's chunk is gone before the first block's backward begins
        warm_up=max(0.0, warm_up_bytes(config, cuts, again, kept, full, ran) - head - max(logits, transient)),
        host=host,
    )


def _planned(states: StateBytes, beside: float, **terms: float) -> RankMemory:
    """Of these terms and states, with what more the optimizer's step needs than a batch. beside: activations, messages
    and buffers that are there then."""
    held = {name: getattr(states, name) for name in ("weights", "gradients", "master", "moments", "file")}
    memory = RankMemory(**held | {"host": states.host + states.staging} | terms)
    step = states.held + states.temporary + beside
    return replace(memory, workspace=memory.workspace + max(0.0, step - memory.total))


def pipeline_memory(run: PlannedStages) -> tuple[RankMemory, ...]:
    """`rank_memory` of every pipeline coordinate."""
    return tuple(rank_memory(run, rank) for rank in range(run.program.num_ranks))


def _states(run: PlannedStages, rank: int) -> StateBytes:
    """Of the stages of a rank."""
    config, program, cuts, plan = run.config, run.program, run.cuts, run.plan
    total, scratch = StateBytes(), 0
    places = MemoryPlan((), plan.fraction, plan.file_fraction, plan.hosts_params)  # what of it states depend on
    for stage in run.stages_of(rank):
        states = state_bytes(
            config,
            run.world_size,
            first_alike(config.model, cuts[stage]),
            num_stages=len(cuts),
            plan=places,
            versions=program.weight_versions[rank],
            num_gradients=program.gradient_buffers,
            on_cpu=run.on_cpu,
        )
        total, scratch = total + states, max(scratch, states.scratch)
    # Gradients that go to the host share one pool, of pieces of one size.
    total = replace(total, scratch=scratch) if plan.hosts_params else total
    total = as_built(run, rank, total)
    beside = sum(program.weight_versions[rank] * kept_bytes(config, cuts[stage]) for stage in run.stages_of(rank))
    beside += sum(gathered_bytes(config, cuts[stage], run.world_size) for stage in run.stages_of(rank))
    return replace(total, weights=total.weights + beside)


def as_built(run: PlannedStages, rank: int, states: StateBytes) -> StateBytes:
    """The states with what was read from the rank in place of what was worked out."""
    if run.held is None:
        return states
    names = ("weights", "gradients", "master", "moments", "host", "file")
    return replace(states, **{name: getattr(run.held[rank], name) for name in names})


def foreign_memory(
    run: PlannedStages,
    rank: int,
    states: StateBytes,
    kept: Mapping[int, StageActivations],
    *,
    message: float,
    logits: float,
) -> RankMemory:
    """Bytes on a rank that holds stages of a module of the user's own, which were measured.

    message: between stages. logits: what comes and goes in the loss.
    """
    program, shared = run.program, shared_memory_bytes(run.config, run.on_cpu)
    full, boundary, head, _ = _peak(program, rank, kept, logits)
    messages = _messages(program, rank, on_cpu=run.on_cpu) * message
    return _planned(
        states,
        _kept_by_step(program, rank, kept) + messages + shared,
        activations=full,
        boundary=boundary + messages,
        logits=head + logits,
        buffers=states.scratch + states.gathered + (shared if run.on_cpu else PRODUCT_WORKSPACE),
    )


@cache
def moved(program: Program, rank: int) -> Residency:
    """Where the activations of a batch are, of a program that moves some of them."""
    assert program.room is not None
    return residency(program.order(rank, program.batch(0)), program.recomputed, program.room)


def weights_moved(program: Program, rank: int) -> ChunkTraffic:
    """What comes to the device, of a program whose weights live on the host; of a batch long enough to show it."""
    return chunk_traffic(program, rank, walked(program))


def _messages(program: Program, rank: int, *, on_cpu: bool) -> int:
    """Messages between stages that are there: one each way; on a CPU as many as `comm.Channel` lets gloo send without
    a wait, until a batch drains."""
    if program.num_ranks == 1 or not on_cpu:
        return 2 * (program.num_ranks > 1)
    ends = {0, program.num_stages - 1}
    sent = sum(2 - (stage in ends) for stage, _ in program.placement.stages_of(rank)) * program.num_microbatches
    return UNFINISHED_SENDS if program.asynchronous else max(2, min(sent, UNFINISHED_SENDS))


def _buffers(config: Config, on_cpu: bool) -> float:
    """Of messages and products; with sequence parallelism whole sequences, one at a time, and its gradient."""
    always = shared_memory_bytes(config, on_cpu) if on_cpu else PRODUCT_WORKSPACE
    gathers = config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size > 1
    return always + gathers * 2.0 * micro_tokens(config) * config.model.hidden_size * ElementBytes.of(config).compute


def shared_memory_bytes(config: Config, on_cpu: bool, *, of_others: bool = False) -> float:
    """What CPU ranks of one host, over tp and over ep, exchange their messages through: 8 slots of 1 MiB for each.
    of_others: without this rank's."""
    sizes = config.parallel.tensor_model_parallel_size, config.parallel.experts.expert_model_parallel_size
    return sum((size - of_others) * (128.0 + 8 * 2**20) for size in sizes if on_cpu and size > 1)


def _peak(
    program: Program, rank: int, kept: Mapping[int, StageActivations], transient: float
) -> tuple[float, float, float, float]:
    """(Activations, boundary, head, what comes and goes) at the moment at which their sum is largest.

    transient: while a forward or backward runs. It is over when an I has ended; what then waits for W was part of it.
    """
    if walked(program) * len(kept) * 2 > WALKED_ACTIONS:
        return *_declared_peak(program, rank, kept), transient
    found = [(0.0, 0.0, 0.0, transient)]
    for peak in memory_peaks(program, rank):
        if peak.ended != STEPPED:
            waiting = 0.0 if peak.ended is None else kept[peak.ended].weight_only_block
            found.append((*peak.held(kept), max(0.0, transient - waiting)))
    return max(found, key=sum)


def _kept_by_step(program: Program, rank: int, kept: Mapping[int, StageActivations]) -> float:
    """Activations of the batches that a pipeline which never drains has begun when it steps."""
    if not program.asynchronous:
        return 0.0
    peaks = (peak for peak in memory_peaks(program, rank) if peak.ended == STEPPED)
    return max((sum(peak.held(kept)) for peak in peaks), default=0.0)


def _declared_peak(program: Program, rank: int, kept: Mapping[int, StageActivations]) -> tuple[float, float, float]:
    peak = program.peak_activations[rank]
    heaviest = max(kept.values(), key=lambda k: k.total)
    late = max(k.weight_only for k in kept.values())
    heads = max(k.head for k in kept.values())
    inputs = program.num_microbatches if program.recomputed else peak.full
    return (
        peak.full * heaviest.full + peak.weight_only * late,
        inputs * heaviest.boundary,
        max(heads, peak.full / max(1, len(kept)) * heads),
    )
