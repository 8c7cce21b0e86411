"""Timelines as text: the drawing at the head of every schedule's file, and of the log of a run.

    rank 0  F0 F1 .. .. B0-B0 F2 B1-B1 ..  ..  B2-B2      one column per unit of time; `..` is idle
    rank 1  .. F0 B0-B0 F1 B1-B1 F2 B2-B2 ..  ..  ..

Small letters: second chunk of a rank, or the pipeline that runs upwards. With more than two chunks the stage is written
in front, `4F0`. A pair that runs together is `F2b0`. Times that share no unit (measured ones) are drawn to scale with
one letter per action.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, gcd, lcm

from megalite.schedule.action import COMPUTE_KINDS, OVERLAP, Action
from megalite.schedule.program import Program
from megalite.schedule.simulate import Span, Timeline, simulate

IDLE, MAX_COLUMNS = "..", 400


def render_text(timeline: Timeline | Program, *, scaled_width: int = 110, line_width: int | None = None) -> str:
    """The grid, one line per rank.

    Exact if all times are multiples of a common unit and fit in MAX_COLUMNS of it; else to scale in scaled_width
    characters. line_width: longer lines are broken, all ranks together, into blocks below each other.
    A program is simulated at its own costs.
    """
    timeline = simulate(timeline) if isinstance(timeline, Program) else timeline
    rows: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in timeline.spans:
        rows[span.rank].append(span)
    unit = _common_unit(timeline.spans)
    column = 1
    if unit is not None and timeline.makespan / unit <= MAX_COLUMNS:
        column = _cell_width(timeline, unit) + 1
        lines = [_exact_row(row, timeline, unit, column - 1) for row in rows]
    else:
        lines = [_scaled_row(row, timeline, scaled_width) for row in rows]
    digits = len(str(timeline.num_ranks - 1))
    names = [f"rank {rank:>{digits}}  " for rank in range(timeline.num_ranks)]
    length = max(map(len, lines), default=0)
    block = length if line_width is None else max((line_width - len(names[0])) // column, 1) * column
    blocks = [
        "\n".join((name + line[at : at + block]).rstrip() for name, line in zip(names, lines, strict=True))
        for at in range(0, max(length, 1), max(block, 1))
    ]
    return "\n\n".join(blocks)


def short_label(action: Action, timeline: Timeline) -> str:
    """`F0`, `f0` for the second chunk or the upward pipeline, `4F0` where there are more than two chunks."""
    if action.kind == OVERLAP:
        return "".join(short_label(part, timeline) for part in action.parts)
    chunk = action.stage // timeline.num_ranks
    if timeline.num_chunks > 2:
        return f"{action.stage}{action.kind}{action.microbatch}"
    second = chunk == 1 or action.replica % 2 == 1
    return f"{action.kind.lower() if second else action.kind}{action.microbatch}"


def _common_unit(spans: Sequence[Span]) -> Fraction | None:
    """Largest time of which every start and end is a multiple; None if times are not exact."""
    times = {time for span in spans for time in (span.start, span.end) if time}
    if not times or not all(isinstance(time, int | Fraction) for time in times):
        return None
    exact = [Fraction(time) for time in times]
    denominator = lcm(*(time.denominator for time in exact))
    return Fraction(gcd(*(int(time * denominator) for time in exact)), denominator)


def _cell_width(timeline: Timeline, unit: Fraction) -> int:
    """Least width of a column such that every label fits into the columns of its span."""
    width = len(IDLE)
    for span in timeline.spans:
        columns = int((span.end - span.start) / unit)
        if columns:
            width = max(width, ceil((len(short_label(span.action, timeline)) + 1) / columns) - 1)
    return width


def _exact_row(spans: Sequence[Span], timeline: Timeline, unit: Fraction, width: int) -> str:
    columns = int(timeline.makespan / unit)
    cells = [IDLE.ljust(width) for _ in range(columns)]
    joints = [" "] * columns
    for span in spans:
        first, last = int(span.start / unit), int(span.end / unit)
        label = short_label(span.action, timeline)
        if last == first:
            continue
        if len(label) <= width:
            cells[first:last] = [label.ljust(width, "-")] * (last - first)
            cells[last - 1] = label.ljust(width)
            joints[first : last - 1] = "-" * (last - first - 1)
        else:  # wider than a column: it is written once and drawn out with dashes
            whole = label.ljust((width + 1) * (last - first) - 1, "-")
            cells[first:last] = [whole[i * (width + 1) :][:width] for i in range(last - first)]
            joints[first : last - 1] = whole[width :: width + 1]
    return "".join(cell + joint for cell, joint in zip(cells, joints, strict=True))


def _scaled_row(spans: Sequence[Span], timeline: Timeline, width: int) -> str:
    """One letter per action, repeated over its duration: FFFFBBBBBBBB...."""
    makespan = float(timeline.makespan) or 1.0
    line = ["."] * width
    for span in spans:
        if span.action.kind not in COMPUTE_KINDS and span.action.kind != OVERLAP:
            continue
        first, last = round(float(span.start) / makespan * width), round(float(span.end) / makespan * width)
        letter = "X" if span.action.kind == OVERLAP else span.action.kind
        # Neighbours of the same kind alternate in case, so that each can be seen.
        letter = letter.lower() if span.action.microbatch % 2 else letter
        line[first:last] = letter * (last - first)
    return "".join(line[:width])
