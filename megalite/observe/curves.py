"""Curves of a run as SVG, without any dependency: for `tools/report.py`, and for the picture that a run leaves behind.

records of metrics.jsonl -> series (iteration, value) -> an SVG of WIDTH x HEIGHT
"""

import html
import math
from collections import defaultdict
from collections.abc import Sequence

from megalite.observe.stats import Record
from megalite.progress import in_units

Point = tuple[float, float]

WIDTH, HEIGHT, MARGIN = 560, 240, 48
COLORS = ("#1f5fa8", "#c2451e", "#3a7d44", "#7a4a9e")
STYLE = (
    "text { font: 11px system-ui, sans-serif; fill: #666 } .grid { stroke: #e4e4e4 } "
    "polyline { fill: none; stroke-width: 1.6 }"
)


def series(records: Sequence[Record], kind: str, key: str) -> dict[str | None, list[Point]]:
    """Validation set, or part of a blend, or None where there are no names -> (iteration, value) of the records of a
    kind that have the value; the loss of training begins with that of the first iteration."""
    found = defaultdict[str | None, list[Point]](list)
    for record in records:
        if (first := record.get("first_lm_loss")) is not None and (kind, key) == ("train", "lm_loss"):
            found[None].append((1.0, float(first)))
        value = record.get(key) if record.get("kind") == kind else None
        for name, number in (value if isinstance(value, dict) else {record.get("set"): value}).items():
            if number is not None:
                found[name].append((float(record["iteration"]), float(number)))
    return found


def render_chart(curves: Sequence[Sequence[Point]], head: str = "") -> str:
    """An SVG with axes; curves share them. A single point is a dot. head: SVG below all."""
    points = [point for curve in curves for point in curve]
    x_ticks = ticks(min(x for x, _ in points), max(x for x, _ in points))
    y_ticks = ticks(min(y for _, y in points), max(y for _, y in points))

    def place(point: Point) -> tuple[float, float]:
        x = (point[0] - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        y = (point[1] - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return MARGIN + x * (WIDTH - MARGIN - 12), HEIGHT - 24 - y * (HEIGHT - 36)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{head}']
    for value in y_ticks:
        _, y = place((x_ticks[0], value))
        parts.append(f'<line class="grid" x1="{MARGIN}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
    for value in x_ticks:
        x, _ = place((value, y_ticks[0]))
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{_tick(value)}</text>')
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, curve))
        parts.append(f'<polyline points="{path}" stroke="{color}"/>')
        if len(curve) == 1:
            x, y = place(curve[0])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
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


def loss_picture(title: str, records: Sequence[Record]) -> str | None:
    """The losses of a run as the text of an SVG file, or None where there are not two points of them."""
    curves = {"training loss": series(records, "train", "lm_loss").get(None, [])}
    if len(curves["training loss"]) < 2:
        return None
    for name, points in series(records, "valid", "lm_loss").items():
        curves[f"validation loss{f' of {name}' if name else ''}"] = points
    head = f'<title>{html.escape(title)}</title><style>{STYLE}</style><rect width="100%" height="100%" fill="white"/>'
    for number, (name, color) in enumerate(zip(curves, COLORS, strict=False)):
        place = f'x="{WIDTH - 14}" y="{24 + 14 * number}" text-anchor="end" style="fill: {color}"'
        head += f"<text {place}>{html.escape(name)}</text>"
    return render_chart([*curves.values()], head).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1) + "\n"
