"""Validator: proves a program before any process starts. Pure, so a schedule of your own is checked on a laptop.

    V1 complete      every micro-batch: one F per stage, then one B, or one I and later one W; one R between them where
                     the stage's forward keeps its input alone; every update: one STEP after them
    V2 acyclic       data dependencies and the ranks' orders contain no circle
    V3 messages      from rank to rank, receives match sends in order; no deadlock when a send waits for its receive
    V4 versions      born before use, alive until the last use, the same for F and B, as old as declared
    V5 declared      live weight versions and gradient buffers stay within the declared numbers
    V6 memory        so do the activations, for any share of them that W needs
    V9 room          activations that wait on the host are back when used; what a rank holds keeps to its capacity at
                     every computation
    V10 weights      those that live on the host are on the device when used, and keep to their room at every use
    V7 summation     whether each stage adds up its gradients in the order of the micro-batches is in the report

Of a program of forwards alone (`decode.py`) V2, V3 and

    V1 complete      every group goes through all stages of all rounds, every chunk of a prompt through the first round
    V8 busy          no rank waits while it has a group to work on: g groups on p ranks take max(g, p) forwards a round

A refused program is drawn with `<-- HERE` at the culprit.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, islice, product
from typing import NamedTuple

from megalite.errors import ScheduleError
from megalite.schedule.action import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    GRADIENT_KINDS,
    NORM,
    RECOMPUTE,
    REDUCE,
    RESHARD,
    STEP,
    UNSHARD,
    Action,
    StageKey,
)
from megalite.schedule.chunks import chunk_faults, least_room, plan_chunks, sizes_of
from megalite.schedule.memory import activation_counts, gradient_buffers, live_versions
from megalite.schedule.message_order import MessageFault, Rendezvous, fifo_faults
from megalite.schedule.passes import insert_communication
from megalite.schedule.program import BatchRange, BatchSpec, Program
from megalite.schedule.simulate import ResultKey, dependencies, produced, simulate
from megalite.schedule.transfers import transfer_faults

MOST_DRAWN = 8  # ranks of a refused program that are drawn
Lists = Sequence[Sequence[Action]]  # the whole run of every rank


class ValidationReport(NamedTuple):
    """What a valid program does. in_order: every stage adds its gradients up in the order of the micro-batches, so the
    sum is bitwise that of a run without a pipeline."""

    in_order: bool


def validate(program: Program, batches: BatchSpec | None = None) -> ValidationReport:
    """Check V1-V7 on a run of some batches (see `BatchSpec`).

    Default: two batches of a flush program, five of an asynchronous one (cold start, steady state and run-out occur),
    one of a program of forwards alone.
    A program without communication gets it first. Raises ScheduleError with the broken rule and a drawing.
    """
    if not program.has_communication:
        program = insert_communication(program)
    if batches is None:
        batches = 5 if program.asynchronous else 1 if program.rounds else 2
    run = program.batches(batches)
    program = program.with_order(cache(program.order))  # each list is read by several rules
    lists = program.unroll(batches)
    for rule, faults in _checks(program, run, lists):
        if faults:
            raise ScheduleError(_refusal(program, rule, faults, lists))
    summation: dict[StageKey, list[int]] = defaultdict(list)
    for _, _, part in _computations(lists):
        if part.kind in GRADIENT_KINDS:
            summation[part.stage_key].append(part.microbatch)
    return ValidationReport(all(not replica and order == sorted(order) for (_, replica), order in summation.items()))


def _checks(program: Program, run: Sequence[BatchRange], lists: Lists) -> Iterator[tuple[str, list[MessageFault]]]:
    what = "micro-batch once on every stage" if program.rounds is None else "group once on every stage of every round"
    yield f"V1 every {what}", _first(_completeness(program, run, lists))
    if program.rounds is None:
        yield "V1 one update after its gradients", _first(_updates(program, run, lists))
        yield "V1 weights gathered when used", _first(_gathers(lists))
    yield "V2 no circle of waits", _circle(program, lists, run)
    yield "V3 receives in the order of the sends", _first(fifo_faults(lists))
    # A rank must not wait for one of several neighbours behind a message to another; only gloo tells what has arrived.
    model = "pair" if program.placement.workers or program.max_in_flight else "direction"
    yield "V3 no deadlock when sends wait for receives", Rendezvous(lists, program.placement, model).faults()
    if program.rounds is not None:
        yield "V8 no rank waits while it has a group to work on", _first(_idle(program, run, lists))
        return
    yield "V4 weight versions", _first(_versions(program, run, lists))
    yield "V5 declared weight versions and gradient buffers", _first(_declared(program, run, lists))
    yield "V6 declared activations", _first(_activations(program, run, lists))
    if program.room is not None:
        yield "V9 room for activations", _first(_transfers(program, lists))
    if program.chunks is not None:
        yield "V10 weights on the device when used", _first(_chunks(program, run))


def _first(faults: Iterator[MessageFault]) -> list[MessageFault]:
    return list(islice(faults, 1))


def _computations(lists: Lists) -> Iterator[tuple[int, int, Action]]:
    """(Rank, position in its list, F, B, I or W) of all computations, rank after rank."""
    for rank, actions in enumerate(lists):
        for position, action in enumerate(actions):
            for part in action.computations():
                yield rank, position, part


def _update_of(program: Program, run: Sequence[BatchRange], microbatch: int) -> int:
    if program.update_per_microbatch:
        return microbatch // program.placement.round
    return next((batch.iteration for batch in run if microbatch < batch.end), len(run))


def _completeness(program: Program, run: Sequence[BatchRange], lists: Lists) -> Iterator[MessageFault]:
    end = run[-1].end
    names, through = {FORWARD: "F", BACKWARD_INPUT: "B or I", BACKWARD_WEIGHT: "B or W"}, [program.num_stages] * end
    if program.rounds is not None:  # chunks of prompts go through the first round alone
        names, first = {FORWARD: "F"}, program.num_stages // program.rounds.number
        numbers = (number for batch in run for number in range(batch.size))
        through = [program.num_stages if number < program.rounds.groups else first for number in numbers]
    seen: set[ResultKey] = set()
    replicas: dict[int, int] = {}
    held = [set(program.placement.stages_of(rank)) for rank in range(program.num_ranks)]
    for rank, position, part in _computations(lists):
        k = part.microbatch
        if part.stage_key not in held[rank]:
            yield MessageFault(f"rank {rank} does not hold the stage of {part}", rank, position)
        elif program.placement.rank_of(*part.stage_key, k) != rank:
            yield MessageFault(f"{part} is not the turn of rank {rank}", rank, position)
        if not 0 <= k < end:
            yield MessageFault(f"{part}: there is no micro-batch {k} ({end} in all)", rank, position)
        elif part.stage >= through[k] or (program.rounds is not None and part.kind != FORWARD):
            yield MessageFault(f"{part} is not wanted", rank, position)
        if replicas.setdefault(k, part.replica) != part.replica:
            yield MessageFault(f"{part}: micro-batch {k} is on two replicas", rank, position)
        again = part.stage in program.recomputed
        if part.kind == RECOMPUTE and (not again or part.stage == program.num_stages - 1):
            why = "its stage keeps what its forward made" if not again else "the last stage computes its loss once"
            yield MessageFault(f"{part}: {why}", rank, position)
        before = {FORWARD: None, RECOMPUTE: FORWARD, BACKWARD_WEIGHT: BACKWARD_INPUT}
        needs = before.get(part.kind, RECOMPUTE if again else FORWARD)
        if needs is not None and (needs, *part.stage_key, k) not in seen:
            yield MessageFault(f"{part} before its {needs}", rank, position)
        results = produced(part)
        if not seen.isdisjoint(results):
            yield MessageFault(f"{part} is done twice", rank, position)
        seen.update(results)
    for microbatch, stage, kind in product(range(end), range(program.num_stages), names):
        replica = replicas.get(microbatch, 0)
        if stage < through[microbatch] and (kind, stage, replica, microbatch) not in seen:
            rank = program.placement.rank_of(stage, replica, microbatch)
            missing = f"micro-batch {microbatch} has no {names[kind]} on stage {stage} (rank {rank})"
            batch_end = next(batch.end for batch in run if microbatch < batch.end)
            places = [at for on, at, part in _computations(lists) if on == rank and part.microbatch < batch_end]
            yield MessageFault(missing, rank, max(places, default=len(lists[rank]) - 1))


def _idle(program: Program, run: Sequence[BatchRange], lists: Lists) -> Iterator[MessageFault]:
    """Whether rounds take longer than their groups and ranks explain: all groups may stand at one stage at once."""
    assert program.rounds is not None
    (rounds, groups), ranks = program.rounds, program.num_ranks
    if program.num_stages != ranks * rounds or len(run) > 1:
        return  # with several chunks of the model on a rank the order of the rounds leaves gaps
    chunks = run[0].size - groups
    most = rounds * max(groups, ranks) + min(groups, ranks) - 1 + chunks
    taken = simulate(program, batches=run).makespan
    if taken > most:
        wrong = f"{rounds} rounds of {groups} groups take {taken} forwards, {most} are enough"
        yield MessageFault(wrong, 0, len(lists[0]) - 1)


def _updates(program: Program, run: Sequence[BatchRange], lists: Lists) -> Iterator[MessageFault]:
    total = run[-1].end // program.placement.round if program.update_per_microbatch else len(run)
    for rank, actions in enumerate(lists):
        next_step: dict[StageKey, int] = dict.fromkeys(program.placement.stages_of(rank), 0)
        reduced: dict[StageKey, int] = {}
        for position, action in enumerate(actions):
            key, update = action.stage_key, action.microbatch
            unreduced = bool(reduced) and reduced.get(key, -1) < update
            if action.kind == REDUCE:
                reduced[key] = update
            elif action.kind == NORM and (update < next_step[key] or unreduced):
                yield MessageFault(f"{action} is not between REDUCE {update} and its STEP", rank, position)
            elif action.kind == STEP:
                if next_step.get(key) != update:
                    yield MessageFault(f"{action}: update {next_step.get(key)} of this stage is next", rank, position)
                elif unreduced:
                    yield MessageFault(f"{action} before REDUCE {update}", rank, position)
                next_step[key] = update + 1
            for part in action.computations():
                if part.kind in GRADIENT_KINDS:
                    update = _update_of(program, run, part.microbatch)
                    if update < next_step[part.stage_key]:
                        yield MessageFault(f"{part} after STEP {update}, which takes its gradient", rank, position)
                    if update <= reduced.get(part.stage_key, -1):
                        yield MessageFault(f"{part} after REDUCE {update}, which sends its gradient", rank, position)
        for (stage, replica), count in next_step.items():
            if count != total:
                missing = f"stage {stage} replica {replica} has {count} of {total} STEPs"
                yield MessageFault(missing, rank, len(actions) - 1)


def _gathers(lists: Lists) -> Iterator[MessageFault]:
    for rank, actions in enumerate(lists):
        if not any(action.kind == UNSHARD for action in actions):
            continue
        gathered: set[StageKey] = set()
        for position, action in enumerate(actions):
            if action.kind == UNSHARD:
                gathered.add(action.stage_key)
            elif action.kind == RESHARD:
                gathered.discard(action.stage_key)
            for part in action.computations():
                if part.stage_key not in gathered:
                    yield MessageFault(f"{part} without UNSHARD of stage {part.stage}", rank, position)


def _circle(program: Program, lists: Lists, run: Sequence[BatchRange]) -> list[MessageFault]:
    """Advances all ranks as far as they can go on. Beside their inputs they wait for the global norm of an update, to
    which every rank has to come (NORM, or STEP without one), and at the end of a batch for its loss. A rank that is not
    at its end is in a circle, or behind one."""
    done: set[ResultKey] = set()
    arrived: dict[tuple[str, int], set[int]] = defaultdict(set)
    lengths = ((len(program.order(rank, batch)) for batch in run) for rank in range(len(lists)))
    ends = [{end: number for number, end in enumerate(accumulate(each))} for each in lengths]
    everyone = sum(map(bool, lists))  # but for a rank whose turn never comes
    position = [0] * len(lists)
    needs: list[tuple[int, list[ResultKey]]] = [(-1, [])] * len(lists)
    before: list[int] = []
    while before != (now := [*position, sum(map(len, arrived.values()))]):
        before = now
        for rank, actions in enumerate(lists):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if needs[rank][0] != position[rank]:
                    needs[rank] = position[rank], [key for _, key in dependencies(action, program.placement)]
                if not done.issuperset(needs[rank][1]):
                    break
                if action.kind in (NORM, STEP) and not program.update_per_microbatch:
                    arrived[STEP, action.microbatch].add(rank)
                    if action.kind == STEP and len(arrived[STEP, action.microbatch]) < everyone:
                        break
                done.update(produced(action))
                if (number := ends[rank].get(position[rank] + 1)) is not None:
                    arrived["end", number].add(rank)
                    if len(arrived["end", number]) < everyone:
                        break
                position[rank] += 1
    return [
        MessageFault(f"rank {rank} waits for the input of {lists[rank][place]}", rank, place)
        for rank, place in enumerate(position)
        if place < len(lists[rank])
    ]


def _versions(program: Program, run: Sequence[BatchRange], lists: Lists) -> Iterator[MessageFault]:
    everywhere: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        copies = program.weight_versions[rank]
        newest: dict[StageKey, int] = defaultdict(int)
        of_forward: dict[tuple[StageKey, int], int] = {}
        for position, action in enumerate(actions):
            if action.kind == STEP:
                newest[action.stage_key] = action.microbatch + 1
            for part in action.computations():
                if part.kind == BACKWARD_WEIGHT:
                    continue
                used, latest, k = part.version, newest[part.stage_key], part.microbatch
                expected = max(_update_of(program, run, k) - program.staleness[part.stage], 0)
                own = of_forward.setdefault((part.stage_key, k), used)
                others = everywhere.setdefault(k, used) if program.consistent else used
                wrong = None
                if used > latest:
                    wrong = f"version {used} is not born (newest {latest})"
                elif used <= latest - copies:
                    wrong = f"version {used} is overwritten (newest {latest}, {copies} copies)"
                elif own != used:
                    wrong = f"its forward used version {own}"
                elif others != used:
                    wrong = f"other stages use version {others}"
                elif used != expected:
                    wrong = f"declared staleness asks for version {expected}"
                if wrong is not None:
                    yield MessageFault(f"{part}: {wrong}", rank, position)


def _declared(program: Program, run: Sequence[BatchRange], lists: Lists) -> Iterator[MessageFault]:
    for rank, actions in enumerate(lists):
        versions, declared = live_versions(actions), program.weight_versions[rank]
        if versions > declared:
            wrong = f"rank {rank} needs {versions} weight versions, declared {declared}"
            yield MessageFault(wrong, rank, len(actions) - 1)
        updates = [
            _update_of(program, run, action.microbatch) if action.kind in GRADIENT_KINDS else None for action in actions
        ]
        buffers = gradient_buffers(actions, updates)
        if buffers > program.gradient_buffers:
            wrong = f"rank {rank} sums {buffers} updates at once, declared {program.gradient_buffers}"
            yield MessageFault(wrong, rank, len(actions) - 1)


def _activations(program: Program, run: Sequence[BatchRange], lists: Lists) -> Iterator[MessageFault]:
    if any(batch.size != program.num_microbatches for batch in run):
        return  # the declared peak is that of num_microbatches
    for rank, actions in enumerate(lists):
        full, more = program.peak_activations[rank]
        owners = [position for position, action in enumerate(actions) for _ in activation_counts([action])]
        for position, (whole, weight_only) in zip(owners, activation_counts(actions), strict=True):
            # Both sides are linear in M_W / M_B, so its two extremes decide for all values between them.
            if whole > full or whole + weight_only > full + more:
                held = f"{whole} + {weight_only} (awaiting W) chunk activations, declared {full} + {more}"
                yield MessageFault(f"rank {rank} holds {held}", rank, position)


def _transfers(program: Program, lists: Lists) -> Iterator[MessageFault]:
    assert program.room is not None
    for rank, actions in enumerate(lists):
        for position, wrong in transfer_faults(actions, program.recomputed, program.room, program.room.capacity[rank]):
            yield MessageFault(wrong, rank, position)


def _chunks(program: Program, run: Sequence[BatchRange]) -> Iterator[MessageFault]:
    assert program.chunks is not None
    sizes, room = sizes_of(program.chunks, program.placement.num_replicas), program.chunks.capacity
    for rank in range(program.num_ranks):
        plan = plan_chunks(program, rank, program.order(rank, run[0]))
        least = least_room([use.wanted for use in plan], sizes)
        for position, wrong in chunk_faults(plan, sizes, least if room is None else room[rank]):
            yield MessageFault(wrong, rank, position)


def _refusal(program: Program, rule: str, faults: Sequence[MessageFault], lists: Lists) -> str:
    lines = [f"schedule {program.name} is refused: {rule}: {faults[0].message}"]
    culprits = {fault.rank: fault.position for fault in faults}
    lines += [_draw_list(rank, lists[rank], culprits[rank]) for rank in sorted(culprits)[:MOST_DRAWN]]
    if len(culprits) > MOST_DRAWN:
        lines.append(f"  and {len(culprits) - MOST_DRAWN} more ranks")
    return "\n".join(lines)


def _draw_list(rank: int, actions: Sequence[Action], culprit: int) -> str:
    """One rank's list on one line, cut to the neighbourhood of the culprit, which is followed by `<-- HERE`."""
    words = [str(action) for action in actions]
    low, high = max(culprit - 4, 0), min(culprit + 4, len(words))
    shown = words[low:culprit] + [f"{words[culprit]} <-- HERE" if words else "<-- HERE"] + words[culprit + 1 : high]
    shown = ["..."] * (low > 0) + shown + ["..."] * (high < len(words))
    return f"  rank {rank}: " + " ".join(shown)
