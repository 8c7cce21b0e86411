"""Timelines as Chrome traces: open the JSON at ui.perfetto.dev or chrome://tracing.

One process per pipeline, one thread per rank (and one per host link where activations move); F, B, I, W are slices
named like `F3 (stage 1)`, STEPs are instants. A simulated and a measured timeline written into one file lie side by
side, as two processes.
"""

import json
from collections.abc import Sequence
from typing import Any

from megalite.schedule.action import Action
from megalite.schedule.simulate import Timeline

_MICROSECONDS = 1000.0
"""Of a millisecond, and of a simulated unit of time, which is drawn as one."""


def trace_events(timeline: Timeline, *, process: int = 0) -> list[dict[str, Any]]:
    """Events of the Trace Event Format (`ts` and `dur` in microseconds)."""
    title = timeline.title or "pipeline"
    kind = "measured" if timeline.unit else "simulated"
    said = title if kind in title or "planned" in title else f"{title} ({kind})"
    name = "; ".join(filter(None, (said, timeline.division)))
    events: list[dict[str, Any]] = [_meta("process_name", process, 0, name)]
    events += [_meta("thread_name", process, rank, f"rank {rank}") for rank in range(timeline.num_ranks)]
    ranks = timeline.num_ranks
    moving = [rank for rank in range(ranks) if any(span.rank == rank for span in timeline.transfers)]
    events += [_meta("thread_name", process, ranks + rank, f"rank {rank}, host link") for rank in moving]
    links = [span._replace(rank=ranks + span.rank) for span in timeline.transfers]
    for span in [*timeline.spans, *links]:
        event: dict[str, Any] = {
            "name": _name(span.action),
            "cat": span.action.kind,
            "pid": process,
            "tid": span.rank,
            "ts": float(span.start) * _MICROSECONDS,
            "args": {"action": str(span.action)},
        }
        if span.end > span.start:
            events.append(event | {"ph": "X", "dur": float(span.end - span.start) * _MICROSECONDS})
        else:
            events.append(event | {"ph": "i", "s": "t"})
    return events


def render_trace(timelines: Sequence[Timeline]) -> str:
    """JSON text of one or more timelines, each as its own process."""
    events = [event for process, timeline in enumerate(timelines) for event in trace_events(timeline, process=process)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _name(action: Action) -> str:
    if action.parts:
        return " + ".join(_name(part) for part in action.parts)
    return f"{action.kind}{action.microbatch} (stage {action.stage})"


def _meta(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
