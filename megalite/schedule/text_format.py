"""Schedules as text files: `--pipeline-schedule-file`, and `dump_program` to write one.

    # anything after a hash is a comment
    name: my-1f1b
    ranks: 2
    stages: 0 1                 rank of each stage, in order; a second `stages:` line is a second replica
    microbatches: 3
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

One batch of a flush schedule: micro-batches 0 .. m-1, computations F B I W and [A+B], and R where a stage keeps its
input alone and runs its forward again. STEP, REDUCE and messages may be left out: they are inserted as for every
schedule, and dropped here if given, because the passes know where they belong.
"""

from dataclasses import replace
from pathlib import Path

from megalite.errors import ScheduleError
from megalite.schedule.action import COMMUNICATION_KINDS, COMPUTE_KINDS, RECOMPUTE, UPDATE_KINDS, Action, parse_action
from megalite.schedule.memory import activation_counts
from megalite.schedule.program import PeakActivations, Program, flush_program
from megalite.schedule.stage_placement import StagePlacement
from megalite.schedule.validate import validate

_INSERTED = COMMUNICATION_KINDS | UPDATE_KINDS


def load_program(path: str | Path) -> Program:
    """Read and prove a schedule file. Raises ScheduleError that names file and line, or draws the broken rule."""
    path = Path(path)
    try:
        program = parse_program(path.read_text(encoding="utf-8"))
        validate(program)
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"`pipeline_schedule_file`={path}: cannot be read ({error})") from error
    except ScheduleError as error:
        raise ScheduleError(f"`pipeline_schedule_file`={path}: {error}") from error
    return program


def parse_program(text: str) -> Program:
    """The program in `text` (see the module), not yet validated. Raises ScheduleError with the line number."""
    fields: dict[str, str] = {}
    replicas: list[tuple[int, ...]] = []
    lists: dict[int, list[Action]] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        key, colon, value = (part.strip() for part in line.partition(":"))
        try:
            if not colon:
                raise ScheduleError(f"{line!r} has no colon; a line is `key: value` or `rank 0: 0F0 0B0`")
            if key == "stages":
                replicas.append(tuple(_integers(value)))
            elif key.startswith("rank "):
                (rank,) = _integers(key.removeprefix("rank "))
                if rank in lists:
                    raise ScheduleError(f"rank {rank} has two lists")
                lists[rank] = [parse_action(word) for word in value.split()]
            elif key in ("name", "ranks", "microbatches"):
                fields[key] = value
            else:
                raise ScheduleError(f"unknown key {key!r}; one of name, ranks, stages, microbatches, rank N")
        except ScheduleError as error:
            raise ScheduleError(f"line {number}: {error}") from error
    return _assemble(fields, replicas, lists)


def _integers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError as error:
        raise ScheduleError(f"{text!r}: whole numbers expected") from error


def _positive(fields: dict[str, str], key: str) -> int:
    value = _integers(fields.get(key, ""))
    if len(value) != 1 or value[0] < 1:
        raise ScheduleError(f"`{key}: N` with N >= 1 is missing")
    return value[0]


def _assemble(fields: dict[str, str], replicas: list[tuple[int, ...]], lists: dict[int, list[Action]]) -> Program:
    p, m, name = _positive(fields, "ranks"), _positive(fields, "microbatches"), fields.get("name", "user")
    if not replicas:
        raise ScheduleError("`stages:` with the rank of each stage is missing")
    if any(len(ranks) != len(replicas[0]) for ranks in replicas):
        raise ScheduleError("the `stages:` lines of all replicas must have the same length")
    holders = {rank for ranks in replicas for rank in ranks}
    if holders != set(range(p)) or set(lists) != set(range(p)) or len(replicas[0]) % p:
        raise ScheduleError(
            f"ranks: {p} needs a `rank R:` list and at least one stage for each R in 0..{p - 1}, and a number of "
            f"stages that is a multiple of {p} (lists: {sorted(lists)}, ranks with stages: {sorted(holders)}, "
            f"{len(replicas[0])} stages)"
        )
    computations = {rank: [action for action in lists[rank] if action.kind not in _INSERTED] for rank in lists}
    for rank in range(p):
        for action in computations[rank]:
            for part in action.parts or (action,):
                _check_place(part, rank, replicas)
                if part.microbatch >= m:
                    raise ScheduleError(
                        f"rank {rank}: {part}: there are micro-batches 0 to {m - 1} (microbatches: {m})"
                    )

    def rank_order(rank: int, size: int) -> list[Action]:
        if size != m:
            raise ScheduleError(f"schedule {name}: its file is written for {m} micro-batches per batch, not {size}")
        return computations[rank]

    def peak(rank: int, _: int) -> PeakActivations:
        counts = activation_counts(computations[rank])
        whole = max((whole for whole, _ in counts), default=0)
        return PeakActivations(whole, max(max((sum(count) for count in counts), default=0) - whole, 0))

    parts = (part for actions in computations.values() for action in actions for part in action.computations())
    again = frozenset(part.stage for part in parts if part.kind == RECOMPUTE)
    program = flush_program(name, StagePlacement(p, tuple(replicas)), m, rank_order, peak)
    return replace(program, recomputed=again)


def _check_place(action: Action, rank: int, replicas: list[tuple[int, ...]]) -> None:
    """Is it a computation, of a stage that this rank holds? The passes and the validator take that for granted."""
    if action.kind not in COMPUTE_KINDS:
        raise ScheduleError(f"rank {rank}: {action}: no computation; write F, B, I, W or R, the rest is inserted")
    if action.replica >= len(replicas) or action.stage >= len(replicas[0]):
        raise ScheduleError(
            f"rank {rank}: {action}: no such stage ({len(replicas)} x {len(replicas[0])} in `stages:`, counted from 0)"
        )
    holder = replicas[action.replica][action.stage]
    if holder != rank:
        raise ScheduleError(
            f"rank {rank}: {action}: that stage is on rank {holder}; move it to its list, or change `stages:`"
        )


def dump_program(program: Program) -> str:
    """One batch of a flush program as text that `parse_program` reads back.

    Raises ScheduleError for an asynchronous program, which no list of one batch describes.
    """
    if program.asynchronous:
        raise ScheduleError(f"schedule {program.name} never drains, so one batch does not describe it")
    batch = program.batch(0)
    lines = [f"name: {program.name}", f"ranks: {program.num_ranks}"]
    lines += ["stages: " + " ".join(map(str, ranks)) for ranks in program.placement.ranks]
    lines.append(f"microbatches: {program.num_microbatches}")
    for rank in range(program.num_ranks):
        actions = (a for a in program.actions_for_batch(rank, batch) if a.kind not in _INSERTED)
        lines.append(f"rank {rank}: " + " ".join(str(_unversioned(action)) for action in actions))
    return "\n".join(lines) + "\n"


def _unversioned(action: Action) -> Action:
    return action._replace(version=-1, parts=tuple(_unversioned(part) for part in action.parts))
