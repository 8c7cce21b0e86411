"""Validator: proves a program before any process starts. Pure, so a schedule of your own is checked on a laptop.

    V1 complete      every micro-batch: one F per stage, then one B, or one I and later one W; every update: one STEP
                     after them
    V2 acyclic       data dependencies and the ranks' orders contain no circle
    V3 wires         receives are the sends, in order, per directed pair; no deadlock when a send waits for its receive
    V4 versions      born before use, alive until the last use, the same for F and B, as old as declared
    V5 declared      live weight versions and gradient buffers stay within the declared numbers
    V6 memory        so do the activations, for any share of them that W needs
    V7 summation     the order in which each stage adds up its gradients is recorded in the report

A refused program is drawn with `<-- HERE` at the culprit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megalite.errors import ScheduleError
from megalite.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    NORM,
    REDUCE,
    RESHARD,
    STEP,
    UNSHARD,
    Action,
)
from megalite.schedule.memory import activation_counts, gradient_buffers, live_versions
from megalite.schedule.message_order import MessageFault, fifo_faults, rendezvous_faults
from megalite.schedule.passes import insert_communication
from megalite.schedule.program import BatchRange, BatchSpec, Program
from megalite.schedule.simulate import dependencies, produced

StageReplica = tuple[int, int]
"""(stage, replica)"""


@dataclass(frozen=True)
class ValidationReport:
    """What a valid program does. summation[stage, replica]: micro-batches in the order in which gradients are added.

    in_order: every stage adds all of them in ascending order, so the sum is bitwise that of a run without a pipeline.
    """

    summation: dict[StageReplica, tuple[int, ...]]
    weight_versions_per_rank: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        replicated = any(replica > 0 for _, replica in self.summation)
        return not replicated and all(list(order) == sorted(order) for order in self.summation.values())


def validate(program: Program, batches: BatchSpec | None = None) -> ValidationReport:
    """Check V1-V7 on a run of some batches (see `BatchSpec`).

    Default: two batches of a flush program, five of an asynchronous one (cold start, steady state and run-out occur).
    A program without communication gets it first. Raises ScheduleError with the broken rule and a drawing.
    """
    if not program.has_communication:
        program = insert_communication(program)
    if batches is None:
        batches = 5 if program.asynchronous else 2
    run = program.batches(batches)
    lists = program.unroll(batches)
    for rule, faults in _checks(program, run, lists):
        if faults:
            raise ScheduleError(_refusal(program, rule, faults, lists))
    summation: dict[StageReplica, list[int]] = defaultdict(list)
    for actions in lists:
        for action in actions:
            for part in action.computations():
                if part.kind in (BACKWARD, BACKWARD_WEIGHT):
                    summation[part.stage, part.replica].append(part.microbatch)
    return ValidationReport(
        {key: tuple(order) for key, order in sorted(summation.items())},
        tuple(live_versions(actions) for actions in lists),
    )


def _checks(
    program: Program, run: Sequence[BatchRange], lists: Sequence[Sequence[Action]]
) -> Iterator[tuple[str, list[MessageFault]]]:
    yield "V1 every micro-batch once on every stage", _first(_completeness(program, run, lists))
    yield "V1 one update after its gradients", _first(_updates(program, run, lists))
    yield "V1 weights gathered when used", _first(_gathers(lists))
    yield "V2 no circle of waits", _circle(program, lists)
    yield "V3 receives in the order of the sends", _first(fifo_faults(lists))
    yield "V3 no deadlock when sends wait for receives", rendezvous_faults(lists, program.placement, "direction")
    yield "V4 weight versions", _first(_versions(program, run, lists))
    yield "V5 declared weight versions and gradient buffers", _first(_declared(program, run, lists))
    yield "V6 declared activations", _first(_activations(program, run, lists))


def _first(faults: Iterator[MessageFault]) -> list[MessageFault]:
    found = next(faults, None)
    return [] if found is None else [found]


def _update_of(program: Program, run: Sequence[BatchRange], microbatch: int) -> int:
    if program.update_per_microbatch:
        return microbatch
    return next((batch.iteration for batch in run if microbatch < batch.end), len(run))


def _completeness(
    program: Program, run: Sequence[BatchRange], lists: Sequence[Sequence[Action]]
) -> Iterator[MessageFault]:
    seen: dict[tuple[str, int, int, int], int] = {}
    replicas: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        held = set(program.placement.stages_of(rank))
        for position, action in enumerate(actions):
            for part in action.computations():
                if (part.stage, part.replica) not in held:
                    yield MessageFault(f"rank {rank} does not hold the stage of {part}", rank, position)
                if not 0 <= part.microbatch < run[-1].end:
                    yield MessageFault(
                        f"{part}: there is no micro-batch {part.microbatch} ({run[-1].end} in all)", rank, position
                    )
                if replicas.setdefault(part.microbatch, part.replica) != part.replica:
                    yield MessageFault(f"{part}: micro-batch {part.microbatch} is on two replicas", rank, position)
                here = (part.stage, part.replica, part.microbatch)
                needs = {FORWARD: None, BACKWARD_WEIGHT: BACKWARD_INPUT}.get(part.kind, FORWARD)
                if needs is not None and (needs, *here) not in seen:
                    yield MessageFault(f"{part} before its {needs}", rank, position)
                for key in produced(part):
                    if key in seen:
                        yield MessageFault(f"{part} is done twice", rank, position)
                    seen[key] = rank
    for microbatch in range(run[-1].end):
        replica = replicas.get(microbatch, 0)
        for stage in range(program.num_stages):
            for kind in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
                if (kind, stage, replica, microbatch) not in seen:
                    rank = program.placement.rank_of(stage, replica)
                    names = {FORWARD: "F", BACKWARD_INPUT: "B or I", BACKWARD_WEIGHT: "B or W"}
                    yield MessageFault(
                        f"micro-batch {microbatch} has no {names[kind]} on stage {stage} (rank {rank})",
                        rank,
                        len(lists[rank]) - 1,
                    )


def _updates(program: Program, run: Sequence[BatchRange], lists: Sequence[Sequence[Action]]) -> Iterator[MessageFault]:
    total = run[-1].end if program.update_per_microbatch else len(run)
    for rank, actions in enumerate(lists):
        next_step: dict[StageReplica, int] = dict.fromkeys(program.placement.stages_of(rank), 0)
        reduced: dict[StageReplica, int] = {}
        for position, action in enumerate(actions):
            key = (action.stage, action.replica)
            if action.kind == REDUCE:
                reduced[key] = action.microbatch
            elif action.kind == NORM:
                if action.microbatch < next_step[key] or reduced and reduced.get(key, -1) < action.microbatch:
                    yield MessageFault(
                        f"{action} is not between REDUCE {action.microbatch} and its STEP", rank, position
                    )
            elif action.kind == STEP:
                if next_step.get(key) != action.microbatch:
                    yield MessageFault(f"{action}: update {next_step.get(key)} of this stage is next", rank, position)
                elif reduced and reduced.get(key, -1) < action.microbatch:
                    yield MessageFault(f"{action} before REDUCE {action.microbatch}", rank, position)
                next_step[key] = action.microbatch + 1
            for part in action.computations():
                if part.kind in (BACKWARD, BACKWARD_WEIGHT):
                    where, update = (part.stage, part.replica), _update_of(program, run, part.microbatch)
                    if update < next_step[where]:
                        yield MessageFault(f"{part} after STEP {update}, which takes its gradient", rank, position)
                    if update <= reduced.get(where, -1):
                        yield MessageFault(f"{part} after REDUCE {update}, which sends its gradient", rank, position)
        for (stage, replica), count in next_step.items():
            if count != total:
                yield MessageFault(
                    f"stage {stage} replica {replica} has {count} of {total} STEPs", rank, len(actions) - 1
                )


def _gathers(lists: Sequence[Sequence[Action]]) -> Iterator[MessageFault]:
    for rank, actions in enumerate(lists):
        if not any(action.kind == UNSHARD for action in actions):
            continue
        gathered: set[StageReplica] = set()
        for position, action in enumerate(actions):
            key = (action.stage, action.replica)
            if action.kind == UNSHARD:
                gathered.add(key)
            elif action.kind == RESHARD:
                gathered.discard(key)
            for part in action.computations():
                if (part.stage, part.replica) not in gathered:
                    yield MessageFault(f"{part} without UNSHARD of stage {part.stage}", rank, position)


def _circle(program: Program, lists: Sequence[Sequence[Action]]) -> list[MessageFault]:
    """Advance all ranks as far as data dependencies allow; whoever is not at its end is in, or behind, a circle."""
    done: set[tuple[str, int, int, int]] = set()
    position = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if any(key not in done for _, key in dependencies(action, program.placement)):
                    break
                done.update(produced(action))
                position[rank] += 1
                moved = True
    return [
        MessageFault(f"rank {rank} waits for the input of {lists[rank][place]}", rank, place)
        for rank, place in enumerate(position)
        if place < len(lists[rank])
    ]


def _versions(program: Program, run: Sequence[BatchRange], lists: Sequence[Sequence[Action]]) -> Iterator[MessageFault]:
    everywhere: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        newest: dict[StageReplica, int] = defaultdict(int)
        forward_version: dict[tuple[int, int, int], int] = {}
        for position, action in enumerate(actions):
            if action.kind == STEP:
                newest[action.stage, action.replica] = action.microbatch + 1
            for part in action.computations():
                if part.kind == BACKWARD_WEIGHT:
                    continue
                here, latest = (part.stage, part.replica, part.microbatch), newest[part.stage, part.replica]
                if part.version > latest:
                    yield MessageFault(f"{part}: version {part.version} is not born (newest {latest})", rank, position)
                if part.version <= latest - program.weight_versions[rank]:
                    yield MessageFault(
                        f"{part}: version {part.version} is overwritten (newest {latest}, "
                        f"{program.weight_versions[rank]} copies)",
                        rank,
                        position,
                    )
                if forward_version.setdefault(here, part.version) != part.version:
                    yield MessageFault(f"{part}: its forward used version {forward_version[here]}", rank, position)
                if program.consistent and everywhere.setdefault(part.microbatch, part.version) != part.version:
                    yield MessageFault(
                        f"{part}: other stages use version {everywhere[part.microbatch]}", rank, position
                    )
                expected = max(_update_of(program, run, part.microbatch) - program.staleness[part.stage], 0)
                if part.version != expected:
                    yield MessageFault(f"{part}: declared staleness asks for version {expected}", rank, position)


def _declared(program: Program, run: Sequence[BatchRange], lists: Sequence[Sequence[Action]]) -> Iterator[MessageFault]:
    for rank, actions in enumerate(lists):
        versions = live_versions(actions)
        if versions > program.weight_versions[rank]:
            declared = program.weight_versions[rank]
            yield MessageFault(
                f"rank {rank} needs {versions} weight versions, declared {declared}", rank, len(actions) - 1
            )
        updates = [
            _update_of(program, run, action.microbatch) if action.kind in (BACKWARD, BACKWARD_WEIGHT) else None
            for action in actions
        ]
        buffers = gradient_buffers(actions, updates)
        if buffers > program.gradient_buffers:
            yield MessageFault(
                f"rank {rank} sums {buffers} updates at once, declared {program.gradient_buffers}",
                rank,
                len(actions) - 1,
            )


def _activations(
    program: Program, run: Sequence[BatchRange], lists: Sequence[Sequence[Action]]
) -> Iterator[MessageFault]:
    if any(batch.size != program.num_microbatches for batch in run):
        return  # the declared peak is that of num_microbatches
    for rank, actions in enumerate(lists):
        declared = program.peak_activations[rank]
        owners = [position for position, action in enumerate(actions) for _ in activation_counts([action])]
        for position, (whole, weight_only) in zip(owners, activation_counts(actions), strict=True):
            # Both sides are linear in M_W / M_B, so its two extremes decide for all values between them.
            if whole > declared.full or whole + weight_only > declared.full + declared.weight_only:
                yield MessageFault(
                    f"rank {rank} holds {whole} + {weight_only} (awaiting W) chunk activations, declared "
                    f"{declared.full} + {declared.weight_only}",
                    rank,
                    position,
                )


def _refusal(program: Program, rule: str, faults: Sequence[MessageFault], lists: Sequence[Sequence[Action]]) -> str:
    lines = [f"schedule {program.name} is refused: {rule}: {faults[0].message}"]
    culprits = {fault.rank: fault.position for fault in faults}
    lines += [draw_list(rank, actions, culprits.get(rank)) for rank, actions in enumerate(lists)]
    return "\n".join(lines)


def draw_list(rank: int, actions: Sequence[Action], culprit: int | None, around: int = 9) -> str:
    """One rank's list on one line, cut to the neighbourhood of the culprit, which is followed by `<-- HERE`."""
    words = [str(action) for action in actions]
    if culprit is None:
        shown = words[: 2 * around] + ["..."] * (len(words) > 2 * around)
    else:
        low, high = max(culprit - around, 0), min(culprit + around, len(words))
        shown = words[low:culprit] + [f"{words[culprit]} <-- HERE" if words else "<-- HERE"] + words[culprit + 1 : high]
        shown = ["..."] * (low > 0) + shown + ["..."] * (high < len(words))
    return f"  rank {rank}: " + " ".join(shown)
