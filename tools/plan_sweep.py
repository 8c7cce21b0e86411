"""A grid of clusters and layouts, a whole search at each point (COMET, Kadiyala et al. 2022, arXiv:2211.16648).

    --sweep hbm_gb=40:640:x2 --sweep inter_gbps=12.5:100:x2 --out sweep.csv,sweep.svg

Memory may have two levels: a device's own, and an expansion (CXL, a host) of `expanded_gb` at `expanded_gbps`. What a
rank keeps fills its own memory first, the rest lies in the expansion, and bytes come at

    1 / BW = x_local / BW_local + x_expanded / BW_expanded        x: parts of what the rank keeps

so a layout that needs the expansion pays for it, and a leaner one may win. The footprint of each answer is shown.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from itertools import product, takewhile
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megalite.config import Config
from megalite.errors import ConfigError
from megalite.extras import optional_package
from megalite.planner import Hardware, Prediction, Roofline, apply, layout_of, layout_text, predict, search
from plan_plot import style

MOST_POINTS = 400
LIKELY = 12
"""Layouts of a search whose time is worked out anew with the expansion's bandwidth."""
GB, GIB = 1e9, 2**30
OF_HARDWARE = ("hbm_gb", "hbm_gbps", "expanded_gb", "expanded_gbps", "intra_gbps", "inter_gbps", "bf16_tflops")
OF_LAYOUT = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "zero_stage",
    "micro_batch_size",
)
SHOWN = ("seconds", "tokens_per_s", "mfu", "footprint_gib", "in_expansion")


class Point(NamedTuple):
    """values: of the swept names. expanded: part of what the fullest rank keeps that lies in the expansion."""

    values: dict[str, float]
    found: Prediction | None
    expanded: float = 0.0


def parse_sweeps(texts: Sequence[str]) -> dict[str, list[float]]:
    """`NAME=LOW:HIGH:xFACTOR`, or `NAME=A,B,C` -> the values. Raises ConfigError."""
    found: dict[str, list[float]] = {}
    for text in texts:
        name, _, given = text.partition("=")
        if name not in (*OF_HARDWARE, *OF_LAYOUT) or name in found:
            raise ConfigError(f"--sweep={text}: names, each once, are {', '.join((*OF_HARDWARE, *OF_LAYOUT))}")
        try:
            values = _values(given)
        except ValueError:
            raise ConfigError(f"--sweep={text}: write it like hbm_gb=40:640:x2, or hbm_gb=40,80") from None
        least = 0.0 if name in ("expanded_gb", "zero_stage") else 1e-9
        whole = name not in OF_LAYOUT or all(value % 1 == 0 for value in values)
        if not (values and whole and all(least <= value < 1e12 for value in values)):
            rule = "numbers that rise, above 0 (whole ones of a layout), times a factor above 1"
            raise ConfigError(f"--sweep={text}: {rule}")
        found[name] = values
    if (count := prod(map(len, found.values()))) > MOST_POINTS:
        raise ConfigError(f"--sweep: {count} searches; at most {MOST_POINTS}, so take fewer values")
    if "expanded_gb" in found and "expanded_gbps" not in found:
        raise ConfigError("--sweep=expanded_gb: at what bandwidth? Add --sweep expanded_gbps=500")
    return found


def grid(texts: Sequence[str]) -> list[dict[str, float]]:
    """The values of each point, in the order of the flags, the last one fastest. Raises ConfigError."""
    sweeps = parse_sweeps(texts)
    return [dict(zip(sweeps, chosen, strict=True)) for chosen in product(*sweeps.values())]


def _values(given: str) -> list[float]:
    """At most one more than may be searched; none where a factor does not make them rise. Raises ValueError."""
    if ":" not in given:
        return [float(word) for word in given.split(",")]
    low, high, step = given.split(":")
    first, last, factor = float(low), float(high) * (1 + 1e-9), float(step.removeprefix("x"))
    rising = (first * factor**number for number in range(MOST_POINTS + 1 if factor > 1 else 0))
    return list(takewhile(lambda value: value <= last, rising))


def check_out(out: str) -> list[Path]:
    """The files. Raises ConfigError."""
    files = [Path(name) for name in out.split(",") if name]
    for file in files:
        if file.suffix not in (".csv", ".svg") or not file.absolute().parent.is_dir():
            raise ConfigError(f"--out={out}: names ending in .csv or .svg, in folders that exist")
        if file.suffix == ".svg":
            optional_package(f"--out={out}", "matplotlib.figure")
    return files


def machine(hardware: Hardware, values: dict[str, float]) -> Hardware:
    """The cluster of a point, without its expansion."""
    at = {name: value * (GB if "gb" in name else 1e12) for name, value in values.items() if name in OF_HARDWARE}
    rates = {**hardware.matrix_flops, **({"bf16": at["bf16_tflops"]} if "bf16_tflops" in at else {})}
    inside, between = hardware.intra_node, hardware.inter_node
    return replace(
        hardware,
        memory_bytes=at.get("hbm_gb", hardware.memory_bytes),
        memory_bandwidth=at.get("hbm_gbps", hardware.memory_bandwidth),
        intra_node=replace(inside, bandwidth=at.get("intra_gbps", inside.bandwidth)),
        inter_node=replace(between, bandwidth=at.get("inter_gbps", between.bandwidth)),
        matrix_flops=rates,
    )


def best_at(
    config: Config, devices: int, hardware: Hardware, values: dict[str, float], given: frozenset[str], stale: bool
) -> Point:
    """The fastest legal layout of a point."""
    fixed: dict[str, Any] = {name: int(value) for name, value in values.items() if name in OF_LAYOUT}
    config = apply(config, replace(layout_of(config), **fixed)) if fixed else config
    local, more = machine(hardware, values), values.get("expanded_gb", 0.0) * GB
    given |= frozenset(fixed)
    likely = list(search(config, devices, local, Roofline(local), given=given, stale=stale, top=1).predictions)
    if more:
        roomy = replace(local, memory_bytes=local.memory_bytes + more)
        likely += search(config, devices, roomy, Roofline(roomy), given=given, stale=stale, top=LIKELY).predictions
    points = []
    for found in likely:
        away = max(0.0, 1 - local.usable_bytes / found.memory_bytes) if more else 0.0
        if away:
            speed = 1 / ((1 - away) / local.memory_bandwidth + away / (values["expanded_gbps"] * GB))
            slower = replace(local, memory_bytes=local.memory_bytes + more, memory_bandwidth=speed)
            found = predict(found.config, devices, slower, Roofline(slower), plan=found.plan)
        points.append(Point(values, found, away))
    return min(points, key=lambda point: point.found.step_time if point.found else 0.0, default=Point(values, None))


def line_of(point: Point) -> str:
    """What is printed of a point."""
    where, found = "  ".join(f"{name} {value:>6g}" for name, value in point.values.items()), point.found
    if found is None:
        return f"{where}  nothing legal fits"
    inside = f" ({point.expanded:.0%} in the expansion)" if point.expanded else ""
    layout = layout_text(found.config, found.world_size, found.plan)
    return f"{where}  {found.step_time:8.4g} s  {found.mfu:6.1%}  {found.memory_bytes / GIB:6.1f} GiB{inside}  {layout}"


def write_csv(points: Sequence[Point], file: Path) -> None:
    """A row a point: values, time, footprint, breakdown in seconds, layout."""
    terms = sorted({name for point in points if point.found for name in point.found.breakdown})
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*points[0].values, *SHOWN, *terms, "layout"])
        for point in points:
            found, row = point.found, list(map(str, point.values.values()))
            if found is not None:
                numbers = (found.step_time, found.tokens_per_s, found.mfu, found.memory_bytes / GIB, point.expanded)
                row += [f"{number:.6g}" for number in (*numbers, *(found.breakdown.get(term, 0.0) for term in terms))]
                row += [str(layout_of(found.config).as_dict(found.world_size))]
            writer.writerow(row)


def draw_sweep(points: Sequence[Point], file: Path) -> None:
    """Seconds over the last name, a curve for each choice of the others."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes, last = figure.subplots(), list(points[0].values)[-1]
    curves: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        label = ", ".join(f"{name} {value:g}" for name, value in point.values.items() if name != last)
        if point.found is not None:
            curves.setdefault(label, []).append((point.values[last], point.found.step_time))
    for label, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), "-o", label=label)
    axes.set(xscale="log", yscale="log", xlabel=last, ylabel="seconds a step")
    if any(curves):
        axes.legend(frameon=False, fontsize=8)
    with style():
        figure.savefig(file, metadata={"Date": None})
