"""A sweep as a picture (matplotlib, imported here only).

devices, parameters     left the rate or the days, right memory or energy, over the axis; what does not fit is a cross
upgrades                a bar for each: how much faster than as it is
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.errors import ConfigError
from megalite.extras import optional_package
from megalite.planner import Prediction, budget, layout_of
from what_if import Row, Sweep

BLUE, ORANGE, GREY = "#0b62a4", "#d1661b", "#8a8a8a"
SUFFIXES = (".svg", ".png")


def check(path: str) -> None:
    """Whether a picture can be written there, before a long sweep. Raises ConfigError."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot={path}: not a kind of picture that is written; end it in .svg or .png")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--plot={path}: no such folder; make it first")
    optional_package(f"--plot={path}", "matplotlib.figure")


def draw(sweep: Sweep, path: str) -> None:
    """Writes the picture of a sweep. Raises ConfigError."""
    with style():
        _draw(sweep, path)


def style() -> Any:
    """Text stays text in an SVG, and the same sweep gives the same file."""
    from matplotlib import rc_context

    return rc_context({"svg.fonttype": "none", "svg.hashsalt": "megalite"})


def _draw(sweep: Sweep, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    figure.suptitle(f"{sweep.title}, {sweep.hardware.name}", fontsize=12, fontweight="bold", x=0.01, ha="left")
    if not sweep.axis:
        _upgrades(figure.subplots(), sweep)
    else:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        found = [row.found for row in _ordered(sweep) if row.found]
        if sweep.question == "token-budget":
            _line(left, sweep, [budget(one, sweep.hardware)[0] for one in found], "days")
            _columns(right, sweep, [budget(one, sweep.hardware)[1] for one in found], "MWh")
        else:
            _line(left, sweep, [one.tokens_per_s for one in found], "tokens/s")
            _columns(right, sweep, [one.memory_bytes / 1e9 for one in found], "GB on the fullest device")
            _limit(right, sweep.hardware.usable_bytes / 1e9)
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.lower().endswith(".svg") else None)
    except OSError as error:
        raise ConfigError(f"--plot={path}: {error.strerror}") from error


def _ordered(sweep: Sweep) -> list[Row]:
    return sorted(sweep.rows, key=lambda row: row.value)


def _line(axes: Any, sweep: Sweep, heights: Sequence[float], unit: str) -> None:
    """Heights over the values of what fits, each with its layout; crosses at the foot for what does not."""
    rows = [row for row in _ordered(sweep) if row.found]
    values = [row.value for row in rows]
    rising = len(rows) > 1 and heights[-1] > heights[0]
    if sweep.axis == "devices" and len(rows) > 1:  # what it would be if more devices cost nothing
        line = [heights[0] * (value / values[0]) ** (1 if rising else -1) for value in values]
        axes.plot(values, line, "--", color=GREY, linewidth=1, label="in proportion to the devices")
        axes.legend(frameon=False, fontsize=8, loc="upper left" if rising else "upper right")
    axes.plot(values, heights, "-o", color=BLUE, linewidth=1.8, markersize=5, zorder=3)
    for value, height, row in zip(values, heights, rows, strict=True):
        assert row.found is not None
        _note(axes, _sizes(row.found), value, height, (8, -9 if rising else 4))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: _short(value))
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set_xticks([row.value for row in sweep.rows], [_short(row.value) for row in sweep.rows])
    axes.xaxis.set_minor_locator(axes.xaxis.get_major_locator())
    low, high = axes.get_ylim()
    axes.set_ylim(low / 2, high * 2)
    for value in (row.value for row in sweep.rows if row.found is None):
        axes.plot([value], [low / 2], "x", color=GREY, markersize=8, clip_on=False, zorder=4)
        _note(axes, "does not fit", value, low / 2, (0, 8), align="center")
    least, most = min(row.value for row in sweep.rows), max(row.value for row in sweep.rows)
    axes.set_xlim(least / 1.5, most * (most / least) ** 0.15 * 1.2)
    axes.set_xlabel(sweep.axis)
    axes.set_title(unit, fontsize=10, loc="left")
    _bare(axes)


def _note(axes: Any, text: str, x: float, y: float, offset: tuple[int, int], align: str = "left") -> None:
    note = axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", ha=align, fontsize=7.5)
    note.set_in_layout(False)


def _columns(axes: Any, sweep: Sweep, heights: Sequence[float], unit: str) -> None:
    """A column for each row that fits, with its height; a cross for the others."""
    rows = _ordered(sweep)
    places = [place for place, row in enumerate(rows) if row.found]
    axes.bar(places, heights, color=ORANGE, width=0.6)
    for place, height in zip(places, heights, strict=True):
        _note(axes, _short(height), place, height, (0, 3), align="center")
    for place, row in enumerate(rows):
        if row.found is None:
            axes.plot([place], [0], "x", color=GREY, markersize=8, clip_on=False)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_xticks(range(len(rows)), [_short(row.value) for row in rows], rotation=45 if len(rows) > 6 else 0)
    axes.set_ylim(0, 1.2 * max(heights, default=1.0))
    axes.set_xlabel(sweep.axis)
    axes.set_title(unit, fontsize=10, loc="left")
    _bare(axes)
    axes.grid(axis="x", visible=False)


def _limit(axes: Any, usable: float) -> None:
    axes.axhline(usable, color=GREY, linestyle="--", linewidth=1, label=f"usable: {_short(usable)} GB")
    axes.set_ylim(0, 1.3 * usable)
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def _upgrades(axes: Any, sweep: Sweep) -> None:
    rows = [row for row in sweep.rows][::-1]
    base = sweep.rows[0].found
    for place, row in enumerate(rows):
        if row.found is None:
            axes.annotate(
                "does not fit", (0, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
            )
            continue
        axes.barh(place, row.found.tokens_per_s, color=GREY if row is sweep.rows[0] else BLUE, height=0.6)
        gain = f"{row.found.tokens_per_s / base.tokens_per_s - 1:+.0%}, " if base and row.found is not base else ""
        axes.annotate(
            f"{gain}{_sizes(row.found)}", (row.found.tokens_per_s, place), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9)
    axes.margins(x=0.35)
    axes.set_xlim(0, None)
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.set_xlabel("tokens/s")
    _bare(axes)
    axes.grid(axis="y", visible=False)


def _bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def _sizes(found: Prediction) -> str:
    """`tp8 pp4 dp32`."""
    layout = layout_of(found.config)
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    return f"tp{tp} pp{pp} dp{found.world_size // tp // pp}"


def _short(value: float) -> str:
    """`1.5 k`, `175 G`."""
    for unit, name in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if value >= unit:
            return f"{value / unit:,.3g}{name}"
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"
