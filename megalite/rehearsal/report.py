"""A whole rehearsal: the ranks, the checks over them, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megalite.rehearsal.classes import distinct_ranks
from megalite.rehearsal.match import Fault, Records, deadlock, match
from megalite.rehearsal.rank import Rehearsed, rehearse_rank

ONLY_A_GPU = (
    "only a GPU tells: errors and numbers of kernels, NCCL's channels, protocols and memory, workspaces of cuBLAS and "
    "cuDNN, gaps between launches, clocks, slow or broken links, drivers, routing that depends on data, what the "
    "compiler reorders (blocks are rehearsed without it)"
)


@dataclass(frozen=True)
class Report:
    """faults: what was found, worst first. rows: (name, text) of what is told beside."""

    faults: Sequence[Fault]
    rows: Sequence[tuple[str, str]]
    records: Records

    @property
    def fails(self) -> bool:
        return any(not fault.warns for fault in self.faults)


def rehearse(
    run: Rehearsed, ranks: Sequence[int] | None = None, *, on_rank: Callable[[int, int], object] = lambda done, of: None
) -> Report:
    """Rehearses ranks (None: the distinct ones) and checks them against each other."""
    chosen = list(distinct_ranks(run) if ranks is None else dict.fromkeys([0, *ranks]))
    records: Records = {}
    for number, rank in enumerate(chosen):
        on_rank(number, len(chosen))
        records = {**records, rank: rehearse_rank(run, rank)}
    faults = []
    for rank, record in records.items():
        if record.problem is not None:
            faults.append(Fault("start" if record.calls and record.calls[-1].phase.startswith("start") else "step",
                                f"rank {rank} fails: {record.problem}"))  # fmt: skip
    faults += [] if faults else [*match(records), *deadlock(records), *races(records)]
    return Report(faults, list(_rows(run, records)), records)


def races(records: Records) -> list[Fault]:
    """Check 3: what was found while each rank ran (`order.py`), each pair of lines once."""
    found: dict[str, int] = {}
    for rank, record in records.items():
        for race in record.races:
            found.setdefault(race, rank)
    return [
        Fault("race", f"rank {rank}: {race}\n    let the later one wait for the earlier")
        for race, rank in found.items()
    ]


def _rows(run: Rehearsed, records: Records) -> list[tuple[str, str]]:
    steps = f"{run.steps} steps" + (", evaluation" if run.config.training.eval_iters else "")
    most = max(records.values(), key=lambda record: len(record.calls))
    messages = sum(call.peer is not None for call in most.calls)
    ranks = ", ".join(map(str, list(records)[:8])) + (", ..." if len(records) > 8 else "")
    return [
        ("rehearsed", f"start, {steps} of {len(records)} of {run.size:,} ranks ({ranks})"),
        (
            "a rank at most",
            f"{len(most.calls) - messages:,} collectives, {messages:,} messages, {most.launches:,} kernels",
        ),
    ]
