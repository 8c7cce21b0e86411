"""One page about a run: curves and numbers of its metrics.jsonl as a single HTML file without any dependency.

metrics.jsonl -> series (iteration, value) -> SVG curves -> report.html, which opens anywhere, offline
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.observe import Record
from megalite.planner import in_units

Point = tuple[float, float]

WIDTH, HEIGHT, MARGIN = 560, 240, 48
#: Of the picture of experts: blocks, and points in time.
MOST_BLOCKS, MOST_COLUMNS = 4, 80
COLORS = ("#1f5fa8", "#c2451e", "#3a7d44", "#7a4a9e")


@dataclass(frozen=True)
class Curve:
    """A named series of (iteration, value)."""

    name: str
    points: Sequence[Point]


def render_report(title: str, runs: Sequence[tuple[str, Sequence[Record]]]) -> str:
    """The page for some runs, each a name and its records (`observers.read_metrics`): one colour a run."""
    charts = [
        ("training loss (nats per token)", "train", "lm_loss"),
        ("validation loss (nats per token)", "valid", "lm_loss"),
        ("bits per byte of validation text", "valid", "bits_per_byte"),
        ("learning rate", "train", "learning_rate"),
        ("gradient norm before clipping", "train", "grad_norm"),
        ("tokens per second", "train", "tokens_per_second"),
        ("peak memory (bytes)", "train", "peak_memory_bytes"),
        ("load-balancing loss of the routers (1: even)", "train", "load_balancing_loss"),
        ("entropy of the least even block's load (1: even)", "train", "load_entropy"),
        ("tokens of the fullest expert over the mean", "train", "fullest_expert"),
        ("choices dropped", "train", "dropped_fraction"),
    ]
    figures = []
    for name, kind, key in charts:
        curves = [Curve(run, series(records, kind, key)) for run, records in runs]
        if any(curve.points for curve in curves):
            figures.append(f"<figure><figcaption>{name}</figcaption>{render_chart(curves)}</figure>")
    for run, records in runs:
        for block, loads in expert_loads(records):
            caption = f"load of the experts of block {block}, {html.escape(run)} (dark: twice the mean)"
            figures.append(f"<figure><figcaption>{caption}</figcaption>{render_loads(loads)}</figure>")
    legend = "".join(
        f'<li><span style="background:{COLORS[number % len(COLORS)]}"></span>{html.escape(run)}</li>'
        for number, (run, _) in enumerate(runs)
    )
    tables = "".join(f"<h2>{html.escape(run)}</h2>{render_table(records)}" for run, records in runs)
    return PAGE.format(title=html.escape(title), legend=legend, figures="".join(figures), tables=tables)


def series(records: Sequence[Record], kind: str, key: str) -> list[Point]:
    """(iteration, value) of the records of a kind that have the value."""
    return [
        (float(record["iteration"]), float(record[key]))
        for record in records
        if record.get("kind") == kind and record.get(key) is not None
    ]


def render_table(records: Sequence[Record]) -> str:
    """What the start and summary lines of a run say."""
    rows: list[tuple[str, object]] = []
    starts = [record for record in records if record.get("kind") == "start"]
    if starts:
        rows += [(key, starts[-1].get(key)) for key in ("layout", "device", "megalite_version", "torch_version")]
        rows.append(("starts", ", ".join(str(record["iteration"]) for record in starts)))
    for summary in [record for record in records if record.get("kind") == "summary"][-1:]:
        rows += [(key, value) for key, value in summary.items() if key not in ("kind", "time")]
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(_shown(value))}</td></tr>" for name, value in rows
    )
    return f"<table>{cells}</table>"


def render_chart(curves: Sequence[Curve]) -> str:
    """An SVG with axes; curves share them. A single point is a dot."""
    points = [point for curve in curves for point in curve.points]
    x_ticks = ticks(min(x for x, _ in points), max(x for x, _ in points))
    y_ticks = ticks(min(y for _, y in points), max(y for _, y in points))

    def place(point: Point) -> tuple[float, float]:
        x = (point[0] - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        y = (point[1] - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return MARGIN + x * (WIDTH - MARGIN - 12), HEIGHT - 24 - y * (HEIGHT - 36)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for value in y_ticks:
        _, y = place((x_ticks[0], value))
        parts.append(f'<line class="grid" x1="{MARGIN}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
    for value in x_ticks:
        x, _ = place((value, y_ticks[0]))
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{_tick(value)}</text>')
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, curve.points))
        parts.append(f'<polyline points="{path}" stroke="{color}"/>')
        if len(curve.points) == 1:
            x, y = place(curve.points[0])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
    return "".join([*parts, "</svg>"])


def expert_loads(records: Sequence[Record]) -> list[tuple[str, list[tuple[int, list[int]]]]]:
    """(Block, (iteration, percent of the mean of each expert) over time) of at most `MOST_BLOCKS`, first and last among
    them."""
    lines = [record for record in records if record.get("kind") == "train" and record.get("expert_load")]
    blocks = list(lines[0]["expert_load"]) if lines else []
    last = len(blocks) - 1
    chosen = sorted({round(n * last / (MOST_BLOCKS - 1)) for n in range(MOST_BLOCKS)}) if last > 0 else range(last + 1)
    every = math.ceil(len(lines) / MOST_COLUMNS)
    return [
        (blocks[n], [(int(line["iteration"]), line["expert_load"][blocks[n]]) for line in lines[::every]])
        for n in chosen
    ]


def render_loads(loads: Sequence[tuple[int, Sequence[int]]]) -> str:
    """An SVG: a column for each point in time, a row for each expert, 0 on top; white takes no tokens."""
    wide, high = (WIDTH - MARGIN - 12) / len(loads), (HEIGHT - 36) / len(loads[0][1])
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for column, (_, percents) in enumerate(loads):
        for row, percent in enumerate(percents):
            parts.append(
                f'<rect x="{MARGIN + column * wide:.1f}" y="{12 + row * high:.1f}" width="{wide:.1f}" '
                f'height="{high:.1f}" fill="{COLORS[0]}" fill-opacity="{min(1.0, percent / 200):.2f}"/>'
            )
    for expert in (0, len(loads[0][1]) - 1):
        y = 12 + (expert + 0.5) * high
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{expert}</text>')
    for column in sorted({0, len(loads) - 1}):
        x = MARGIN + (column + 0.5) * wide
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{loads[column][0]}</text>')
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, about five, that enclose `low .. high`."""
    if high <= low:
        pad = abs(low) / 2 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / 4
    scale = 10 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _tick(value: float) -> str:
    return in_units(value) if abs(value) >= 1e4 else f"{value:.3g}"


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em; color: #222 }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(480px, 1fr)); gap: 1.5em }}
figure {{ margin: 0 }} figcaption {{ font-weight: 600 }}
svg {{ width: 100% }} svg text {{ font-size: 11px; fill: #666 }} .grid {{ stroke: #e4e4e4 }}
polyline {{ fill: none; stroke-width: 1.6 }}
ul {{ list-style: none; padding: 0 }} li {{ display: inline; margin-right: 1.5em }}
li span {{ display: inline-block; width: 1em; height: .7em; margin-right: .4em }}
th {{ text-align: left; font-weight: 400; color: #666; padding-right: 2em }}
</style></head><body><h1>{title}</h1><ul>{legend}</ul><main>{figures}</main>{tables}</body></html>
"""
