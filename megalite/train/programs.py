"""The pipeline programs of a run, each validated once."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from megalite.comm import Axis, all_gather_json
from megalite.config import Config
from megalite.errors import ScheduleError
from megalite.inventory import DEFAULT_PLAN, MemoryPlan, lowered_program
from megalite.schedule import Program, find_schedule, validate

PROVED_AT_START = 16  # programs that a rank validates before the first step: no growing batch stops a run later
LONG_BATCH = 4096  # micro-batches times stages above which only the first rounds of a program are validated and drawn
WIDE_PIPELINE = 64  # ranks above which one of as many is validated and drawn in place of a long batch's program


@dataclass(frozen=True)
class ProgramCache:
    """The pipeline programs of a run: one for each number of micro-batches, and those of the first, flushed steps."""

    config: Config
    plan: MemoryPlan = DEFAULT_PLAN
    _cache: dict[tuple[str, bool, int], Program] = field(default_factory=dict, init=False, repr=False)
    _valid: set[tuple[str, bool, int]] = field(default_factory=set, init=False, repr=False)

    def prove(self, world_size: int, world: Axis) -> None:
        """Validates the programs of all batch sizes of a run of `world_size` ranks, each on one rank of `world`.
        Collective. Raises ScheduleError, the same on all ranks. A program is a pure function of configuration and
        source, which the self-test has compared; of a schedule file the ranks compare a digest."""
        parallel, unit = self.config.parallel, self.config.training.micro_batch_size
        unit *= self.config.data_parallel_size(world_size)
        kinds = sorted({self._kind(iteration) for iteration in (1, parallel.pipeline_flush_steps + 1)})
        sizes = dict.fromkeys(reversed(self.config.batch_size_schedule(world_size).sizes))
        keys = [(*kind, size // unit) for size in sizes for kind in kinds][: PROVED_AT_START * world.size]
        file, problem, digest = parallel.pipeline_schedule_file, None, ""
        try:
            if file is not None:
                digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            for key in keys[world.rank :: world.size]:
                self._validate(key)
        except (ScheduleError, OSError) as error:
            problem = str(error)
        told = all_gather_json([problem, digest], world)
        first = next((problem for problem, _ in told if problem), None)
        if first is not None:
            raise ScheduleError(first)
        other = next((rank for rank, (_, theirs) in enumerate(told) if theirs != told[0][1]), None)
        if other is not None:
            raise ScheduleError(f"`pipeline_schedule_file`={file}: rank {other} reads another file there than rank 0")
        self._valid.update(keys)

    def program(self, num_microbatches: int, iteration: int) -> Program:
        """The lowered, validated program of an iteration with `num_microbatches` micro-batches per replica."""
        key = (*self._kind(iteration), num_microbatches)
        if key not in self._valid:
            self._validate(key)
            self._valid.add(key)
        return self._build(key)

    def full(self, world_size: int) -> Program:
        """The program of a full batch once the first, flushed steps are over."""
        return self.program(self.config.num_microbatches(world_size), self.config.parallel.pipeline_flush_steps + 1)

    def shown(self, world_size: int) -> tuple[Program, list[int] | None]:
        """What is drawn of that program: itself or a narrow one, and which batches (see `short_run`)."""
        steady = self.config.parallel.pipeline_flush_steps + 1
        program = self.narrow((*self._kind(steady), self.config.num_microbatches(world_size)))
        return program, self.short_run(program)

    def _kind(self, iteration: int) -> tuple[str, bool]:
        """(Name of the schedule that an iteration runs, whether its updates are waited for in any case)."""
        parallel = self.config.parallel
        waits = iteration <= parallel.pipeline_flush_steps
        flush = find_schedule(parallel.schedule).flush_schedule if waits else None
        return flush or parallel.schedule, waits

    def _build(self, key: tuple[str, bool, int]) -> Program:
        if key not in self._cache:
            name, waits, num_microbatches = key
            self._cache[key] = lowered_program(self.config, num_microbatches, name, plan=self.plan, waits=waits)
        return self._cache[key]

    def _validate(self, key: tuple[str, bool, int]) -> None:
        program = self.narrow(key)
        shown = self.short_run(program)
        if shown and not program.asynchronous:  # a second one begins as the first did
            shown = [*shown, 2 * program.num_ranks * program.placement.round]
        validate(program, shown)

    def narrow(self, key: tuple[str, bool, int]) -> Program:
        """What is validated and drawn for a program: one of 64 ranks for a long batch on many more, else itself.

        The schedules of the table know their neighbours alone: a pipeline of p ranks is valid if one of 64 is that has
        as many rounds of micro-batches, whose last one is as full (`tests/unit/train/test_long_batches.py` walks wide
        ones). What depends on every rank's own memory or number of workers is taken whole, and so is a schedule file.
        """
        program, (name, waits, m), p = self._build(key), key, WIDE_PIPELINE
        own = self.plan.room is not None or self.plan.chunks is not None or program.max_in_flight > 0
        own |= bool(program.placement.workers) or self.config.parallel.pipeline_schedule_file is not None
        if own or program.num_ranks <= p or m * program.num_stages <= LONG_BATCH:
            return program
        rounds, last = divmod(m, program.num_ranks)
        few = rounds * p + (max(1, last * p // program.num_ranks) if last else 0)
        parallel = replace(self.config.parallel, pipeline_model_parallel_size=p)
        try:
            return lowered_program(replace(self.config, parallel=parallel), few, name, plan=self.plan, waits=waits)
        except ScheduleError:  # this shape has none of 64
            return program

    def short_run(self, program: Program) -> list[int] | None:
        """Micro-batches of the batches that show what a program does: of one, of five if it is asynchronous. None:
        as many as the program has, because they are few.

        To validate or to draw a long batch is slow, and the schedules of the table are periodic: a batch of m
        micro-batches is valid if one of 4p + (m mod 4p) is (`tests/unit/schedule` proves the shapes up to there). A
        schedule file is always taken whole.
        """
        period = 4 * program.num_ranks * program.placement.round
        short = period + program.num_microbatches % period
        of_file = self.config.parallel.pipeline_schedule_file is not None
        if of_file or program.num_microbatches * program.num_stages <= LONG_BATCH or short >= program.num_microbatches:
            return None
        return [short] * (5 if program.asynchronous else 1)
