"""One page about a run: curves and numbers of its metrics.jsonl as a single HTML file without any dependency.

metrics.jsonl -> series (iteration, value) -> SVG curves -> report.html, which opens anywhere, offline
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from datetime import datetime

from megalite.observe import COLORS, HEIGHT, MARGIN, WIDTH, Record, render_chart, series
from megalite.progress import amount, duration

#: Of the picture of experts: blocks, and points in time.
MOST_BLOCKS, MOST_COLUMNS = 4, 80


def render_report(title: str, runs: Sequence[tuple[str, Sequence[Record]]]) -> str:
    """The page for some runs, each a name and its records (`observers.read_metrics`): one colour a run."""
    charts = [
        ("training loss (nats per token)", "train", "lm_loss"),
        ("training loss of a part (nats per token)", "train", "lm_loss_by_part"),
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
        found = [(run, series(records, kind, key)) for run, records in runs]
        for part in dict.fromkeys(part for _, parts in found for part in parts):
            curves = [parts.get(part, []) for _, parts in found]
            caption = f"{name}: {html.escape(part)}" if part else name
            figures.append(f"<figure><figcaption>{caption}</figcaption>{render_chart(curves)}</figure>")
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


def render_table(records: Sequence[Record]) -> str:
    """What the start and summary lines of a run say."""
    rows: list[tuple[str, object]] = []
    starts = [record for record in records if record.get("kind") == "start"]
    if starts:
        rows += [(key, starts[-1].get(key)) for key in ("layout", "device", "megalite_version", "torch_version")]
        rows.append(("starts", ", ".join(str(record["iteration"]) for record in starts)))
    summaries = [record for record in records if record.get("kind") == "summary"]
    if summaries:
        whole = summaries[-1] | (_of_all_starts(records) if len(starts) > 1 else {})
        rows += [(key, value) for key, value in whole.items() if key not in ("kind", "time")]
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(_shown(name, value))}</td></tr>" for name, value in rows
    )
    return f"<table>{cells}</table>"


def _of_all_starts(records: Sequence[Record]) -> Record:
    """Seconds and goodput of a run that was resumed, over all its starts. One that was killed has no summary: its time
    is that of its lines, and nothing is known of its goodput."""
    seconds, useful, known = 0.0, 0.0, 0.0
    began = last = None
    for record in records:
        if record.get("kind") == "start":
            seconds += last - began if began is not None and last is not None else 0.0
            began = last = _clock(record)
        elif record.get("kind") == "summary":
            wall = record.get("wall_time_s") or 0.0
            if (goodput := record.get("goodput")) is not None:
                useful, known = useful + goodput * wall, known + wall
            seconds, began = seconds + wall, None
        else:
            last = _clock(record) or last
    return {"wall_time_s": seconds, "goodput": useful / known if known else None}


def _clock(record: Record) -> float | None:
    try:
        return datetime.fromisoformat(str(record.get("time"))).timestamp()
    except ValueError:
        return None


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


def _shown(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int | float):
        return amount(value, "B")
    if name == "wall_time_s" and isinstance(value, int | float):
        return f"{value:.6g} ({duration(value)})"
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
