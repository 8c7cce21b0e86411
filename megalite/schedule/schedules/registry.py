"""The table of schedules."""

from math import lcm
from types import MappingProxyType
from typing import Any

from megalite.errors import ScheduleError
from megalite.schedule.definition import Schedule, ScheduleShape
from megalite.schedule.program import Program
from megalite.schedule.schedules import (
    breadth_first,
    chimera,
    chimera_doubling,
    dualpipe_v,
    eager_1f1b,
    gpipe,
    interleaved,
    message_driven,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    shifted_critical_path,
    zb_h1,
    zb_h2,
    zb_v,
)

_MODULES = (
    gpipe,
    one_f_one_b,
    eager_1f1b,
    message_driven,
    pipedream,
    pipedream_2bw,
    interleaved,
    breadth_first,
    zb_h1,
    zb_h2,
    zb_v,
    chimera,
    chimera_doubling,
    dualpipe_v,
    shifted_critical_path,
)

SCHEDULES = MappingProxyType({module.SCHEDULE.name: module.SCHEDULE for module in _MODULES})
"""Name -> Schedule, in the order of the gallery."""

ALIASES = MappingProxyType({alias: entry.name for entry in SCHEDULES.values() for alias in entry.aliases})
"""Other names that people know a schedule by -> its name."""


def find_schedule(name: str) -> Schedule:
    """The schedule called `name` or with this alias. Raises ScheduleError that lists all names."""
    schedule: Schedule | None = SCHEDULES.get(ALIASES.get(name, name))
    if schedule is None:
        raise ScheduleError(f"`pipeline_schedule`={name}: no such schedule; one of {', '.join([*SCHEDULES, *ALIASES])}")
    return schedule


def default_schedule(num_chunks: int | None) -> str:
    """What runs when nothing is asked for: interleaved if a rank holds several chunks, else 1f1b."""
    return "interleaved" if num_chunks is not None and num_chunks > 1 else "1f1b"


def resolve_chunks(name: str, num_chunks: int | None) -> int:
    """Chunks per rank: the given number, or the schedule's own (2 for V shapes, else its smallest)."""
    schedule = find_schedule(name)
    return num_chunks if num_chunks is not None else (schedule.num_chunks or schedule.min_chunks)


def shape_of(name: str, p: int, m: int, v: int | None = None, num_pairs: int = 1, **more: Any) -> ScheduleShape:
    """The numbers that a schedule is built for, its own chunks filled in."""
    return ScheduleShape(p, m, resolve_chunks(name, v), num_pairs, **more)


def schedule_problems(name: str, *numbers: Any, **more: Any) -> list[str]:
    """Reasons why this schedule cannot run in this shape, each a full sentence for the user; empty if it can. Numbers:
    as for `build_program`."""
    schedule, shape = find_schedule(name), shape_of(name, *numbers, **more)
    counts = ("number of ranks", "micro-batches per batch", "chunks per rank", "pairs of pipelines")
    wrong = [f"{what} = {n}" for what, n in zip(counts, shape[:4], strict=True) if n < 1]
    reasons = [f"`pipeline_schedule`={name}: {text}, must be 1 or more" for text in wrong]
    if reasons:
        return reasons
    if schedule.num_chunks is not None and shape.v != schedule.num_chunks:
        reasons.append(
            f"`virtual_pipeline_model_parallel_size`={shape.v}: {schedule.name} has {schedule.num_chunks} "
            f"chunk{'s' * (schedule.num_chunks > 1)} per rank; leave it out, or use `pipeline_schedule`=interleaved"
        )
    elif shape.v < schedule.min_chunks:
        reasons.append(
            f"`virtual_pipeline_model_parallel_size`={shape.v}: {schedule.name} needs {schedule.min_chunks} or more "
            "chunks per rank; raise it, or use `pipeline_schedule`=1f1b"
        )
    if shape.f != 1 and not schedule.paired:
        reasons.append(
            f"`chimera_pairs`={shape.f}: {name} has no pairs of opposite pipelines; leave it out, or use "
            "`pipeline_schedule`=chimera"
        )
    if shape.max_in_flight and not schedule.takes_arrivals:
        reasons.append(
            f"`pipeline_max_in_flight`={shape.max_in_flight}: {name} runs a fixed list; leave it out, or use "
            "`pipeline_schedule`=message-driven"
        )
    if shape.workers and not schedule.takes_turns:
        legal = ", ".join(name for name, entry in SCHEDULES.items() if entry.takes_turns)
        reasons.append(f"`pipeline_schedule`={schedule.name}: not with `stage_meshes`; legal: {legal}")
    elif count := next((replicas for replicas in shape.workers if shape.m % replicas), 0):
        reasons.append(
            f"`stage_meshes`: {count} replicas of a stage do not divide m = {shape.m} micro-batches per batch; make "
            f"m a multiple of {lcm(*shape.workers)} by `global_batch_size`, or choose replicas that divide {shape.m}"
        )
    return [*reasons, *schedule.problems(shape)]


def schedule_warnings(name: str, *numbers: Any, **more: Any) -> list[str]:
    """Legal, but there is something the user should know (2BW with m = p-1). Numbers: as for `build_program`."""
    return list(find_schedule(name).warnings(shape_of(name, *numbers, **more)))


def build_program(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    *,
    num_pairs: int = 1,
    workers: tuple[int, ...] = (),
    vertical_sync: bool = False,
    max_in_flight: int | None = None,
) -> Program:
    """The computations and STEPs of a schedule (`passes.lower` adds the rest).

    num_ranks: p. num_microbatches: m per batch. num_chunks: v per rank. num_pairs: Chimera's f. workers: ranks of each
    of the p stages that take its micro-batches in turn; empty: one. vertical_sync: of PipeDream. max_in_flight: of
    message-driven, L.
    Raises ScheduleError with every reason why the shape is illegal.
    """
    numbers = (name, num_ranks, num_microbatches, num_chunks, num_pairs)
    more: dict[str, Any] = {"workers": workers, "vertical_sync": vertical_sync, "max_in_flight": max_in_flight}
    if reasons := schedule_problems(*numbers, **more):
        raise ScheduleError("\n".join(reasons))
    return find_schedule(name).build(shape_of(*numbers, **more))
