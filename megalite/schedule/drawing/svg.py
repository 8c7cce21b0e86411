"""Timelines as self-contained SVG: the picture for slides, the README and the run directory.

One lane per rank, one box per action: forward blue (run again: paler), backward green, input gradient teal, weight
gradient amber. Idle time is hatched. The second chunk of a rank (or the upward pipeline of Chimera) is drawn darker;
the batches of an asynchronous run alternate between two depths, so that one sees a batch begin before the last one
ends; a tick under a lane is the end of an optimizer step, grey where its time was measured. Hovering over a box names
the action. No script, no font, no link: one text file.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import floor, log10

from megalite.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    EVICT,
    FETCH,
    FORWARD,
    PREFETCH,
    RECOMPUTE,
    STEP,
    Action,
)
from megalite.schedule.program import Program
from megalite.schedule.simulate import Span, Timeline, simulate

LANE, GAP, BOX_RADIUS = 34, 8, 4
LEFT, RIGHT, TOP, BOTTOM = 74, 150, 76, 62
WIDEST = 1500  # the time axis, in pixels
BOXES = {
    FORWARD: ("forward", "#5b8def", "#2f5fc4"),
    RECOMPUTE: ("forward again", "#a3bff6", "#86a3de"),
    BACKWARD: ("backward", "#43b581", "#1f8257"),
    BACKWARD_INPUT: ("input gradient", "#2fb3b8", "#167f86"),
    BACKWARD_WEIGHT: ("weight gradient", "#f2b84b", "#cf8a14"),
}
"""Kind -> its name in the legend, fill of the first and of the second chunk."""
OTHER = ("", "#a9b1c2", "#7d869a")
INK, MUTED, PAPER, LANE_FILL, HATCH = "#1d2433", "#69738a", "#ffffff", "#f3f5f9", "#dfe4ee"
OPTIMIZER = "#b4bccd"
TRANSFERS = {EVICT: "#9b6fd0", PREFETCH: "#d06fa8", FETCH: "#d0a06f"}
FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

HOW_TO_READ = (
    "A lane is a rank, a box one micro-batch in one stage, its number that of the micro-batch; time runs to the right. "
    "<b>bubble</b>: the idle time of all ranks, in % of their whole time, and in brackets in % of the time for which "
    "they work. <b>act</b>: the most micro-batches whose activations a rank keeps at once; behind it, how much of the "
    "time the rank is idle. More: docs/schedules.md."
)


@dataclass(frozen=True)
class _Canvas:
    """Where times and ranks are on the paper."""

    timeline: Timeline

    @cached_property
    def scale(self) -> float:
        """Pixels per unit of time: the shortest action is wide enough for its number, unless the paper ends first."""
        makespan = float(self.timeline.makespan) or 1.0
        shortest = min((float(s.end - s.start) for s in self.timeline.spans if s.end > s.start), default=makespan)
        return min(30 / shortest, WIDEST / makespan)

    def x(self, time: float) -> float:
        return LEFT + time * self.scale

    def y(self, rank: int) -> float:
        return TOP + rank * (LANE + GAP)

    @property
    def right(self) -> float:
        return self.x(float(self.timeline.makespan))

    @property
    def bottom(self) -> float:
        return self.y(self.timeline.num_ranks) - GAP


def render_svg(timeline: Timeline | Program, *, title: str | None = None) -> str:
    """The picture; a program is simulated first. title: heading (default: the timeline's)."""
    timeline = simulate(timeline) if isinstance(timeline, Program) else timeline
    canvas = _Canvas(timeline)
    width, height = canvas.right + RIGHT, canvas.bottom + BOTTOM
    body = [
        *_heading(canvas, timeline.title if title is None else title),
        *_axis(canvas),
        *(part for rank in range(timeline.num_ranks) for part in _lane(canvas, rank)),
        *(part for span in timeline.spans for part in _span(canvas, span)),
        *(_transfer(canvas, span) for span in timeline.transfers),
        *_legend(canvas, height),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"',
            f'width="{width:.0f}" height="{height:.0f}" font-family="{FONT}" font-size="13">',
            '<defs><pattern id="idle" width="7" height="7" patternUnits="userSpaceOnUse"',
            'patternTransform="rotate(45)">',
            f'<rect width="7" height="7" fill="{LANE_FILL}"/><rect width="2" height="7" fill="{HATCH}"/>',
            "</pattern></defs>",
            f'<rect width="{width:.0f}" height="{height:.0f}" rx="12" fill="{PAPER}"/>',
            *body,
            "</svg>\n",
        ]
    )


def render_html(timelines: Sequence[Timeline], *, heading: str = "Pipeline schedules") -> str:
    """A page with one picture per timeline, for a run directory: plan and reality one above the other."""
    pictures = "\n".join(f"<figure>{render_svg(timeline)}</figure>" for timeline in timelines)
    style = (
        f"body{{margin:32px;background:#e9edf4;color:{INK};font-family:{FONT}}}"
        "figure{margin:0 0 24px;overflow-x:auto}svg{filter:drop-shadow(0 2px 8px #1d243322)}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(heading)}</title>'
        f"<style>{style}</style></head><body><h1>{escape(heading)}</h1>\n<p>{HOW_TO_READ}</p>\n{pictures}\n</body></html>\n"
    )


def _heading(canvas: _Canvas, title: str) -> Iterator[str]:
    timeline = canvas.timeline
    total, ideal = float(timeline.bubble_over_total), float(timeline.bubble_over_ideal)
    facts = [f"bubble {total:.1%} of the time ({ideal:.1%} of the work)"]
    facts.append(f"{len(timeline.batch_starts)} batches" if len(timeline.batch_starts) > 1 else "one batch")
    if timeline.weight_versions_per_rank:
        most = max(timeline.weight_versions_per_rank)
        facts.append(f"{most} weight versions" if most > 1 else "one weight version")
    yield f'<text x="20" y="31" font-size="19" font-weight="650" fill="{INK}">{escape(title)}</text>'
    yield f'<text x="20" y="52" fill="{MUTED}">{escape("  ·  ".join(facts))}</text>'
    if timeline.division:
        yield f'<text x="20" y="{TOP - 9}" font-size="11" fill="{MUTED}">{escape(timeline.division)}</text>'
    if timeline.peak_activations_per_rank:
        x = canvas.right + 14
        yield f'<text x="{x:.1f}" y="{TOP - 10}" font-size="11" fill="{MUTED}">activations · idle</text>'


def _lane(canvas: _Canvas, rank: int) -> Iterator[str]:
    timeline, y = canvas.timeline, canvas.y(rank)
    middle = y + LANE / 2 + 4.5
    yield f'<text x="20" y="{middle:.1f}" fill="{INK}">rank {rank}</text>'
    yield (
        f'<rect x="{LEFT}" y="{y:.1f}" width="{canvas.right - LEFT:.1f}" height="{LANE}" rx="{BOX_RADIUS}" '
        f'fill="url(#idle)"/>'
    )
    idle = float(timeline.idle_per_rank[rank]) / (float(timeline.makespan) or 1.0)
    note = f"{idle:.0%} idle"
    if timeline.peak_activations_per_rank:
        note = f"{float(timeline.peak_activations_per_rank[rank]):g} act · {idle:.0%}"
    yield f'<text x="{canvas.right + 14:.1f}" y="{middle:.1f}" fill="{MUTED}">{note}</text>'


def _span(canvas: _Canvas, span: Span) -> Iterator[str]:
    y, left, right = canvas.y(span.rank), canvas.x(float(span.start)), canvas.x(float(span.end))
    times = f"{float(span.start):g} to {float(span.end):g} {canvas.timeline.unit}".rstrip()
    tip = f"<title>{escape(str(span.action))}: {times}</title>"
    if span.action.kind == STEP:
        if right - left > 1.2:  # measured; a plan's takes no time
            yield (
                f'<rect x="{left + 0.6:.2f}" y="{y + 0.6:.2f}" width="{right - left - 1.2:.2f}" '
                f'height="{LANE - 1.2:.2f}" rx="{min(BOX_RADIUS, (right - left) / 3):.1f}" fill="{OPTIMIZER}"/>'
            )
        yield (
            f'<g>{tip}<path d="M{right:.1f} {y + LANE + 1:.1f}l-4 6h8z" fill="{INK}"/>'
            f'<path d="M{right:.1f} {y:.1f}v{LANE}" stroke="{INK}" stroke-width="1.6"/></g>'
        )
        return
    parts = list(span.action.computations()) or [span.action]
    height = LANE / len(parts)
    for index, part in enumerate(parts):
        yield from _box(canvas, part, left, right, y + index * height, height, tip)


def _transfer(canvas: _Canvas, span: Span) -> str:
    """A thin bar in the gap below the lane: to the host, and under it from the host."""
    y = canvas.y(span.rank) + LANE + (1 if span.action.kind == EVICT else GAP / 2 + 1)
    left, right = canvas.x(float(span.start)), canvas.x(float(span.end))
    return (
        f"<g><title>{escape(str(span.action))}: {float(span.start):g} to {float(span.end):g}</title>"
        f'<rect x="{left:.2f}" y="{y:.1f}" width="{max(right - left, 1):.2f}" height="{GAP / 2 - 1:.1f}" '
        f'fill="{TRANSFERS[span.action.kind]}"/></g>'
    )


def _box(
    canvas: _Canvas, action: Action, left: float, right: float, top: float, height: float, tip: str
) -> Iterator[str]:
    timeline = canvas.timeline
    second = action.stage // timeline.num_ranks % 2 == 1 or action.replica % 2 == 1
    fill = BOXES.get(action.kind, OTHER)[1 + second]
    odd_batch = (bisect_right(timeline.batch_starts, action.microbatch) - 1) % 2 == 1
    width = max(right - left - 1.2, 0.6)
    fill = _paler(fill) if odd_batch else fill
    yield (
        f'<g>{tip}<rect x="{left + 0.6:.2f}" y="{top + 0.6:.2f}" width="{width:.2f}" height="{height - 1.2:.2f}" '
        f'rx="{min(BOX_RADIUS, width / 3):.1f}" fill="{fill}"/>'
    )
    text, size = str(action.microbatch), 12.5 if height > 20 else 10
    if width > 0.62 * size * len(text) + 3:
        yield (
            f'<text x="{(left + right) / 2:.1f}" y="{top + height / 2 + size * 0.36:.1f}" font-size="{size}" '
            f'font-weight="600" text-anchor="middle" fill="#ffffff" pointer-events="none">{text}</text>'
        )
    yield "</g>"


def _paler(colour: str) -> str:
    """The colour `#rrggbb` mixed with paper, solid so that no hatching shines through."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(0.66 * channel + 0.34 * 255):02x}" for channel in channels)


def _axis(canvas: _Canvas) -> Iterator[str]:
    """Time ticks at round numbers, below the lanes."""
    makespan = float(canvas.timeline.makespan)
    step = _round_step(makespan / max((canvas.right - LEFT) / 90, 1))
    y, time = canvas.bottom, 0.0
    while step and time <= makespan * 1.0001:
        x = canvas.x(time)
        yield f'<path d="M{x:.1f} {TOP - 4}V{y + 6:.1f}" stroke="{HATCH}"/>'
        yield f'<text x="{x:.1f}" y="{y + 21:.1f}" font-size="11" text-anchor="middle" fill="{MUTED}">{time:g}</text>'
        time = round(time / step + 1) * step
    if canvas.timeline.unit:
        x = canvas.right + 14
        yield f'<text x="{x:.1f}" y="{y + 21:.1f}" font-size="11" fill="{MUTED}">{canvas.timeline.unit}</text>'


def _round_step(least: float) -> float:
    """Smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    if least <= 0:
        return 0.0
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _legend(canvas: _Canvas, height: float) -> Iterator[str]:
    x, y = float(LEFT), height - 22
    computations = [part for span in canvas.timeline.spans for part in span.action.computations()]
    for kind, (name, fill, _) in BOXES.items():
        if any(part.kind == kind for part in computations):
            yield f'<rect x="{x:.0f}" y="{y:.1f}" width="13" height="13" rx="3" fill="{fill}"/>'
            yield f'<text x="{x + 19:.0f}" y="{y + 11:.1f}" font-size="12" fill="{MUTED}">{name}</text>'
            x += 40 + 6.2 * len(name)
    notes = []
    if any(part.replica % 2 == 1 for part in computations):
        notes.append("darker: pipeline that runs upwards")
    elif canvas.timeline.num_chunks > 1:
        notes.append("darker: second chunk of the rank")
    if len(canvas.timeline.batch_starts) > 1:
        notes.append("paler: every second batch")
    if steps := [span for span in canvas.timeline.spans if span.action.kind == STEP]:
        notes.append("grey up to ▲: optimizer step" if any(s.end > s.start for s in steps) else "▲ optimizer step")
    if canvas.timeline.transfers:
        weights = any(span.action.kind == FETCH for span in canvas.timeline.transfers)
        notes.append(f"bars below: {'weights' if weights else 'activations'} to and from the host")
    notes.append("hatched: idle")
    yield f'<text x="{x:.0f}" y="{y + 11:.1f}" font-size="12" fill="{MUTED}">{escape("  ·  ".join(notes))}</text>'
