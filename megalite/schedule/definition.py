"""`Schedule`: what a module of `schedules/` declares; `ScheduleShape`: the numbers that a program is built for."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megalite.schedule.action import Action
from megalite.schedule.program import PeakActivations, Program, flush_program
from megalite.schedule.stage_placement import StagePlacement, loop, round_robin


class ScheduleShape(NamedTuple):
    """The numbers of a program."""

    p: int  # ranks
    m: int  # micro-batches per batch
    v: int = 1  # chunks per rank
    f: int = 1  # pairs of pipelines (Chimera only)
    workers: tuple[int, ...] = ()  # of each of then p stages: ranks that take micro-batches in turn; empty: one each
    vertical_sync: bool = False  # of PipeDream: one version on all stages
    max_in_flight: int | None = None  # of message-driven, L; None: its default

    @property
    def placement(self) -> StagePlacement:
        """One stage on a rank, or on the ranks that take turns."""
        return round_robin(self.workers) if self.workers else loop(self.p)

    def stage_of(self, rank: int) -> int:
        """The stage of a rank of `placement`."""
        return self.placement.stages_of(rank)[0][0] if self.workers else rank

    def ahead(self, rank: int) -> int:
        """Forwards of its own that a rank runs ahead of its backwards, so that every rank behind it has work: one less
        than PipeDream's NOAM, ceil(ranks from this stage on / ranks of this stage)."""
        stage = self.stage_of(rank)
        return -(-sum(self.workers[stage:]) // self.workers[stage]) - 1 if self.workers else self.p - 1 - rank


@dataclass(frozen=True, repr=False)
class Schedule:
    """One schedule of the table."""

    name: str  # and `aliases`: what `--pipeline-schedule` takes
    title: str  # for people, and so is `paper`
    paper: str
    build: Callable[[ScheduleShape], Program]
    problems: Callable[[ScheduleShape], Iterable[str]] = lambda shape: ()  # why it is illegal
    warnings: Callable[[ScheduleShape], Iterable[str]] = lambda shape: ()  # why it is legal but unwise
    aliases: tuple[str, ...] = ()
    num_chunks: int | None = 1  # the only v that it has (2 for V shapes); None: the user's choice, from `min_chunks` on
    min_chunks: int = 1
    splits_backward: bool = False  # whether it uses I and W
    asynchronous: bool = False  # whether it never drains, so that several versions of the weights exist at once
    update_per_microbatch: bool = False  # whether each stage steps after every micro-batch instead of every batch
    recomputes: bool = False  # whether all stages but the last keep their input alone and run the forward again (R)
    paired: bool = False  # whether opposite pipelines share the ranks; f is the user's choice, a stage has 2f copies
    gathers_once: bool = False  # a chunk runs all micro-batches in a row: ZeRO-3 gathers it once a batch and direction
    flush_schedule: str | None = None  # what its first iterations may run instead (`--pipeline-flush-steps`)
    zero_excluded: Mapping[int, str] = field(default_factory=dict)  # ZeRO stage -> why it cannot be combined with this
    # (Times of a rank's F, I, W of one micro-batch, v) -> the paper's idle time per rank and batch, divided by p - 1.
    idle: Callable[[float, float, float, int], float] = lambda f, i, w, v: f + i + w
    # Micro-batches whose activations the fullest rank holds at least.
    in_flight: Callable[[ScheduleShape], float] = lambda shape: min(shape.m, shape.p)
    takes_turns: bool = False  # whether the ranks of a stage share its micro-batches, unlike in number by stage
    takes_arrivals: bool = False  # whether a rank runs what has arrived, instead of a list

    def __repr__(self) -> str:
        return f"Schedule({self.name!r})"


def flush_schedule(
    name: str,
    title: str,
    paper: str,
    placement: Callable[[ScheduleShape], StagePlacement],
    rank_order: Callable[[int, ScheduleShape], Iterable[Action]],
    peak: Callable[[int, ScheduleShape], PeakActivations],
    problems: Callable[[ScheduleShape], Iterable[str]] = lambda shape: (),
    program_facts: Callable[[ScheduleShape], dict[str, Any]] = lambda shape: {},
    **facts: Any,
) -> Schedule:
    """A schedule whose every batch ends with an empty pipeline.

    rank_order, peak: (rank, shape) -> the computations of one batch with local ids; the activations it declares.
    program_facts, facts: further fields of its programs, and of `Schedule`.
    """

    def build(shape: ScheduleShape) -> Program:
        program = flush_program(
            name,
            placement(shape),
            shape.m,
            lambda rank, m: rank_order(rank, shape._replace(m=m)),
            lambda rank, m: peak(rank, shape._replace(m=m)),
        )
        return replace(program, **program_facts(shape))

    return Schedule(name, title, paper, build, problems, **facts)


def fewer_than(name: str, shape: ScheduleShape, said: str, least: int, instead: str, why: str = "") -> Iterator[str]:
    """The problem of too few micro-batches a batch, if they are. said: how the papers write `least`, p or 2p-1."""
    if shape.m < least:
        numbers = f"p = {least} ranks" if said == "p" else f"{said} = {least} (p = {shape.p} ranks)"
        yield (
            f"`pipeline_schedule`={name}: m = {shape.m} micro-batches per batch are fewer than {numbers}{why}; raise "
            f"`global_batch_size`, or use `pipeline_schedule`={instead}"
        )
