"""The figures of a schedule, for people and for scripts: what `tools/show_schedule.py` prints.

Times are in the unit of the given costs; activations in micro-batches through all layers of a rank. `bubble_over_ideal`
is idle over work, (p-1)/m for 1F1B; `bubble_over_total` is idle over the whole time, (p-1)/(m+p-1).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from megalite.schedule import Program, Time, Timeline


def number(value: Time) -> int | float:
    """A Fraction as the int it is, or as a float."""
    return int(value) if isinstance(value, Fraction) and value.denominator == 1 else float(value)


def figures(program: Program, timeline: Timeline) -> dict[str, Any]:
    """JSON-ready figures of a simulated run of `program`. Lists have one entry per rank."""
    num_batches = len(timeline.batch_starts)
    return {
        "schedule": program.name,
        "pipeline_model_parallel_size": program.num_ranks,
        "virtual_pipeline_model_parallel_size": program.placement.chunks_per_rank,
        "num_microbatches": program.num_microbatches,
        "num_batches": num_batches,
        "makespan": number(timeline.makespan),
        "makespan_per_batch": number(timeline.makespan / num_batches),
        "busy_per_rank": [number(time) for time in timeline.busy_per_rank],
        "idle_per_rank": [number(time) for time in timeline.idle_per_rank],
        "idle_inside_per_rank": [number(time) for time in timeline.idle_inside_per_rank],
        "bubble_over_ideal": float(timeline.bubble_over_ideal),
        "bubble_over_total": float(timeline.bubble_over_total),
        "peak_activations_per_rank": [number(peak) for peak in timeline.peak_activations_per_rank],
        "weight_versions": max(program.weight_versions),
        "weight_versions_per_rank": list(program.weight_versions),
        "weight_copies": max(program.weight_versions) * program.placement.num_replicas,
        "gradient_staleness_per_stage": list(program.staleness),
    }


def summary(facts: dict[str, Any]) -> str:
    """The figures in a few aligned lines, below a drawing."""
    stale, batches = sorted(set(facts["gradient_staleness_per_stage"])), facts["num_batches"]
    once = f"; the pipeline fills once in {batches} batches, and in more (--num-batches) it idles for a smaller part"
    rows = [
        ("time", f"{facts['makespan']:g} for {facts['num_batches']} x {facts['num_microbatches']} micro-batches"),
        (
            "bubble",
            f"{facts['bubble_over_total']:.1%} of the time, {facts['bubble_over_ideal']:.1%} of the work"
            f"{once * (batches > 1 and stale[-1] > 0)}",
        ),
        ("idle", _list(facts["idle_per_rank"])),
        ("idle inside", _list(facts["idle_inside_per_rank"])),
        ("activations", f"{_list(facts['peak_activations_per_rank'])} micro-batches at most"),
        ("weight versions", _list(facts["weight_versions_per_rank"])),
        ("gradient age", f"{' to '.join(str(age) for age in (stale[0], stale[-1])[: len(stale)])} updates"),
    ]
    return "\n".join(f"{name:<16}{text}" for name, text in rows)


def comparison(rows: Sequence[dict[str, Any] | tuple[str, str]]) -> str:
    """A table of several schedules. A row is `figures(...)`, or (name, reason) of one that is illegal in this shape."""
    head = ("schedule", "v", "time/batch", "bubble", "idle inside", "activations", "weight copies", "gradient age")
    table = [head]
    notes = []
    for row in rows:
        if isinstance(row, tuple):
            notes.append(f"{row[0]}: {row[1]}")
            continue
        inside = max(row["idle_inside_per_rank"]) / row["makespan"]
        table.append(
            (
                row["schedule"],
                str(row["virtual_pipeline_model_parallel_size"]),
                f"{row['makespan_per_batch']:.4g}",
                f"{row['bubble_over_total']:.1%}",
                f"{inside:.1%}",
                f"{max(row['peak_activations_per_rank']):.4g}",
                str(row["weight_copies"]),
                str(max(row["gradient_staleness_per_stage"])),
            )
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, *notes])


def _list(values: Sequence[float]) -> str:
    """`3` if all ranks agree, else `4 3 2 1`."""
    texts = [f"{value:g}" for value in values]
    return f"{texts[0]} on every rank" if len(set(texts)) == 1 else " ".join(texts)
