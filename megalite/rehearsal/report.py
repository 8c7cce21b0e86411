"""A whole rehearsal, of a run or of a user's function: the ranks, the checks over them, and what is told of it."""

import gc
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from unittest.mock import patch

from megalite.comm import World
from megalite.host_waits import allowed_wait
from megalite.planner import Hardware
from megalite.rehearsal.classes import class_of, distinct_ranks
from megalite.rehearsal.match import Fault, Records, deadlock, differ, match, or_nothing
from megalite.rehearsal.memory import Found, memory, memory_faults, of_log
from megalite.rehearsal.pieces import Piece, pieces
from megalite.rehearsal.rank import Rehearsed, and_the_first, record_rank, rehearse_rank
from megalite.rehearsal.record import Call, Communicators, RankRecord
from megalite.rehearsal.streams import Gpu
from megalite.rehearsal.timing import Prices, step_rows
from megalite.train import quiet_collector

ONLY_A_GPU = (
    "only a GPU tells: errors and numbers of kernels, NCCL's channels, protocols and memory, workspaces of cuBLAS and "
    "cuDNN, gaps between launches, clocks, slow or broken links, drivers, routing that depends on data, what the "
    "compiler reorders (blocks are rehearsed without it)"
)
TEXT = 1 << 14
"""Bytes of a text that travel in one collective: what one rank says may be a digit longer than what another does."""


@dataclass(frozen=True)
class Report:
    """faults: what was found, worst first. rows: (name, text) of what is told beside."""

    faults: Sequence[Fault]
    rows: Sequence[tuple[str, str]]
    records: Records
    memory: Sequence[Found] = ()

    def __str__(self) -> str:
        wrong, doubtful = (sum(fault.warns is warns for fault in self.faults) for warns in (False, True))
        found = f"{wrong} faults, {doubtful} warnings" if self.faults else "nothing"
        rows = [f" {name:<16}{text}" for name, text in [*self.rows, ("found", found)]]
        return "\n".join([*(f"{fault}\n" for fault in self.faults), *rows, f" {ONLY_A_GPU}"])

    @property
    def fails(self) -> bool:
        return any(not fault.warns for fault in self.faults)


def rehearse_run(
    run: Rehearsed,
    ranks: Sequence[int] | None = None,
    *,
    device_bytes: float | None = None,
    hardware: Hardware | None = None,
    on_rank: Callable[[int, int], object] = lambda done, of: None,
) -> Report:
    """Rehearses ranks (None: the distinct ones) and checks them against each other. device_bytes: what a run may use of
    a device. hardware: on which the time of a step is estimated."""
    run = run if hardware is None else replace(run, prices=Prices(run.config, hardware))
    chosen = sum(distinct_ranks(run), []) if ranks is None else and_the_first(ranks, run.size)
    records = recorded(chosen, lambda rank: rehearse_rank(run, rank), on_rank)
    report = judged(records, run.size, lambda: memory(run, records), lambda: alike(run, records), device_bytes)
    if hardware is None or not report.memory or run.config.model.is_foreign:
        return report
    return replace(report, rows=[*report.rows, *step_rows(run, records, hardware)])


def rehearse(function: Callable[[World], object], nprocs: int, *, ranks: Sequence[int] | None = None) -> Report:
    """Rehearses `function(world)`, which `megalite.run` would start on `nprocs` GPUs, one rank after the other.

    ranks: these and rank 0 only; None: all. A few are enough where they are one of each kind: the ends of every axis.

    Numbers that `function` reads from the device are 1 (a loss, a norm): its loops must end by their count. Returns
    what was found: `print` it, or read `faults`. Raises ConfigError where no rank would start.
    """

    def trains(gpu: Gpu, world: World) -> Sequence[Piece]:
        steps = count(1)

        @contextmanager
        def watched(executor: object, *_: object) -> Iterator[None]:
            gpu.calls.enter(f"iteration {next(steps)}")
            vars(executor)["mark"] = gpu.calls.mark
            yield

        with (
            patch("megalite.comm.gathered_json._HEAD_BYTES", TEXT),
            patch("megalite.library.pipeline.watched", watched),
        ):
            function(world)
        gpu.calls.enter("the end")
        return ()

    known, chosen = Communicators(), and_the_first(range(nprocs) if ranks is None else ranks, nprocs)
    records = recorded(chosen, lambda rank: record_rank(trains, rank, nprocs, known))
    return judged(records, nprocs, lambda: [of_log(record, record.log, None) for record in records.values()])


def recorded(
    ranks: Sequence[int],
    record: Callable[[int], RankRecord],
    on_rank: Callable[[int, int], object] = lambda done, of: None,
) -> Records:
    """What they do, one after the other. Garbage is collected where the product says so, and after each rank."""
    records = {}
    with quiet_collector():
        for number, rank in enumerate(ranks):
            on_rank(number, len(ranks))
            records[rank] = record(rank)
            gc.collect()
    return records


def judged(
    records: Records,
    size: int,
    memory_of: Callable[[], Sequence[Found]],
    more: Callable[[], Sequence[Fault]] = list,
    device_bytes: float | None = None,
) -> Report:
    """All checks over what the ranks have done. more: those that know what ranks are alike."""
    faults = [
        Fault("step" if "iteration" in record.phase else "start", f"rank {rank} fails: {record.problem}")
        for rank, record in records.items()
        if record.problem is not None
    ]
    found: Sequence[Found] = ()
    if not faults:
        found = memory_of()
        faults = [*match(records), *more(), *deadlock(records), *races(records), *pieces(records), *syncs(records)]
        faults += memory_faults(found, device_bytes)
    return Report(_once(faults), [*_rows(records, size, found)], records, found)


def _once(faults: Sequence[Fault]) -> list[Fault]:
    """What is the same on many ranks but for their number, and for how much, is told once."""
    found: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        found[RANK.sub("", fault.text) if fault.check in ("memory", "race", "sync") else fault.text].append(fault)
    more = {n: f"\n    ({n - 1} more of the rehearsed ranks do)" if n > 1 else "" for n in map(len, found.values())}
    return [replace(same[0], text=same[0].text + more[len(same)]) for same in found.values()]


def alike(run: Rehearsed, records: Records) -> list[Fault]:
    """Ranks of one class start the same, each towards its own neighbours."""
    first: dict[Any, int] = {}
    for rank, record in records.items():
        other = first.setdefault(class_of(run, rank), rank)
        if (at := differ(records[other].calls, record.calls, Call.canonical)) is not None:
            told = [or_nothing(each.calls, at) for each in (records[other], record)]
            text = f"call {at + 1} of rank {other} is {told[0]}\n    and of rank {rank}, of the same kind, {told[1]}"
            return [Fault("match", f"{text}\n    what only some ranks do belongs on an axis")]
    return []


def races(records: Records) -> list[Fault]:
    """Check 3: what was found while each rank ran (`order.py`)."""
    told = [f"rank {rank}: {race}" for rank, record in records.items() for race in record.races]
    return [Fault("race", f"{text}\n    let the later one wait for the earlier") for text in told]


LIBRARY = re.compile(r"library/(agreement|pipeline|optimizer)\.py:\d+ (reach|step|execute|_agree|_sample)\b")
"""Whose steps do more than actions."""
WIDE = 24
"""Of the largest bar of a drawing."""
RANK = re.compile(r"^rank \d+|\d+\.\d+")


def syncs(records: Records) -> list[Fault]:
    """Check 5: where the host waits for the device in the last iteration, `HOST_WAITS` apart."""
    advice = "keep the value on the device, or see megalite/host_waits.py"
    return [
        Fault("sync", f"rank {rank}: the host waits for the device {n} times a step: {at}\n    {advice}", warns=True)
        for rank, record in records.items() for at, n in host_waits(record).items()
    ]  # fmt: skip


def host_waits(record: RankRecord) -> Counter[str]:
    """Why and where the host waits in the actions of the last iteration, or in a later step of the library, and should
    not -> how often."""
    found, inside = Counter[str](), False
    for kind, _, _, _, text in record.log:
        if kind == "phase" and text.startswith("iteration"):
            found = Counter()
        elif kind == "action":
            inside = bool(text)
        elif kind == "sync" and (inside or LIBRARY.search(text)) and allowed_wait(text) is None:
            found[text] += 1
    return found


def as_json(report: Report) -> str:
    """What was found and told, for programs."""
    memory = [
        {"rank": each.rank, "allocated": each.allocated, "reserved": each.reserved,
         "planned": each.planned and each.planned.total, "peak": each.at_peak}
        for each in report.memory
    ]  # fmt: skip
    told = {"faults": [vars(fault) for fault in report.faults], "rows": dict(report.rows), "memory": memory}
    return json.dumps(told | {"ranks": list(report.records), "fails": report.fails}, indent=1)


def explain(report: Report, what: str) -> str:
    """`memory`: the largest of the fullest rank's peak by source line; `communicators`: who sends how much over what;
    `syncs`: where the host waits, start and end included."""
    record = next(iter(report.records.values()))
    lines = [f"rank {record.rank}, all that was rehearsed"]
    if what == "memory" and report.memory:
        most = max(report.memory, key=lambda each: each.allocated)
        lines = [f"rank {most.rank}: alive when most of its memory is"]
        for place, size in most.at_peak:
            lines.append(f"{size / 2**20:12,.1f} MiB {'#' * round(WIDE * size / most.at_peak[0][1]):{WIDE}} {place}")
    if what == "communicators":
        sums: dict[str, Counter[str]] = {}
        for call in record.calls:
            row = sums.setdefault(str(call.communicator), Counter())
            row[call.kind] += 1
            row["MiB"] += call.nbytes / 2**20  # type: ignore[assignment]  # a sum of reals
        lines += [f"{name}: {', '.join(f'{n:,.1f} {k}' if k == 'MiB' else f'{n} {k}' for k, n in row.items())}"
                  for name, row in sums.items()]  # fmt: skip
    if what == "syncs":
        counts = Counter(text for kind, _, _, _, text in record.log if kind == "sync")
        lines += [f"  {n:4} x {text}" for text, n in counts.items()]
    return "\n".join(lines)


def _rows(records: Records, size: int, found: Sequence[Found]) -> Iterator[tuple[str, str]]:
    most = max(records.values(), key=lambda record: len(record.calls))
    steps = sum(event[0] == "phase" and event[4].startswith("iteration") for event in most.log)
    messages = sum(call.peer is not None for call in most.calls)
    ranks = ", ".join(map(str, list(records)[:8])) + (", ..." if len(records) > 8 else "")
    counts = f"{len(most.calls) - messages:,} collectives, {messages:,} messages, {most.launches:,} kernels"
    yield "rehearsed", f"{steps} steps, from start to end, of {len(records)} of {size:,} ranks ({ranks})"
    yield "a rank at most", counts
    if found:
        full = max(found, key=lambda each: each.reserved)
        used = f"{full.allocated / 2**30:.2f} GiB allocated, {full.reserved / 2**30:.2f} reserved on rank {full.rank}"
        plan = "" if full.planned is None else f"; the plan says {full.planned.total / 2**30:.2f}, any experts balanced"
        yield "memory", used + plan
