"""The page about a run: well-formed, complete, and safe with any name."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from megalite.observe.curves import render_chart, series, ticks
from tools.report_page import expert_loads, render_loads, render_report, render_table


def _records(losses: list[float | None]) -> list[dict]:
    start = {"kind": "start", "iteration": 0, "layout": "tp2", "device": "cpu"}
    lines = [{"kind": "train", "iteration": 10 * n, "lm_loss": loss} for n, loss in enumerate(losses, 1)]
    summary = {"kind": "summary", "status": "completed", "iteration": 10 * len(losses), "lm_loss": losses[-1]}
    return [start, *lines, {"kind": "valid", "iteration": 10, "lm_loss": 2.5}, summary]


def test_steps_without_a_value_are_left_out() -> None:
    assert series(_records([3.0, None, 2.0]), "train", "lm_loss") == {None: [(10.0, 3.0), (30.0, 2.0)]}


def test_the_page_holds_curves_and_tables_of_all_runs() -> None:
    page = render_report("a <b>", [("a", _records([3.0, 2.0])), ("<b>", _records([4.0, 1.0]))])
    tree = ElementTree.fromstring(page.removeprefix("<!doctype html>\n").replace('<meta charset="utf-8">', ""))
    lines = tree.findall(".//polyline")
    assert len(lines) == 4, "training and validation loss, two runs each"
    assert len({line.get("stroke") for line in lines}) == 2
    text = "".join(tree.itertext())
    assert "training loss" in text and "completed" in text and "tp2" in text and "<b>" in text
    assert "learning rate" not in text, "what no run has logged has no empty chart"


def test_points_lie_where_the_axes_say() -> None:
    svg = ElementTree.fromstring(render_chart([[(0, 1.0), (50, 3.0), (100, 2.0)]]))
    line = svg.find("polyline")
    assert line is not None
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert points[1][0] == pytest.approx((points[0][0] + points[2][0]) / 2, abs=0.1)
    assert points[1][1] < points[2][1] < points[0][1], "up is less in SVG"
    assert points[2][1] == pytest.approx((points[0][1] + points[1][1]) / 2, abs=0.1)


def test_the_load_of_experts_is_a_picture() -> None:
    """Of a few blocks and points in time; a rectangle is as dark as the load, its rows are experts."""
    records = [
        {"kind": "train", "iteration": n, "expert_load": {str(block): [0, 100, 300] for block in range(12)}}
        for n in range(1, 161)
    ]
    loads = expert_loads(records)
    assert [block for block, _ in loads] == ["0", "4", "7", "11"]
    assert [point for point, _ in loads[0][1]] == list(range(1, 161, 2))
    boxes = ElementTree.fromstring(render_loads(loads[0][1])).findall("rect")
    assert [float(box.attrib["fill-opacity"]) for box in boxes[:3]] == [0.0, 0.5, 1.0]
    assert len(boxes) == 240 and len({box.attrib["x"] for box in boxes[:3]}) == 1
    page = render_report("a", [("a", [*_records([3.0]), *records])])
    assert page.count("load of the experts of block") == 4
    assert expert_loads(_records([3.0])) == []


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1.23, 1.24), (-5, 1e6), (3, 3), (0, 0), (1e-7, 3e-4)])
def test_ticks_are_round_and_enclose(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 8
    steps = {round(b - a, 12) for a, b in zip(found, found[1:], strict=False)}
    step = found[1] - found[0]
    assert len(steps) == 1
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 2.5, 5, 10)


def test_time_and_goodput_are_of_all_starts() -> None:
    """100 s, 60 % of them useful; a start that was killed after 30 s; 20 s, all useful: 150 s, (60 + 20) / 120."""

    def line(kind: str, at: int, **more: object) -> dict:
        return {"kind": kind, "iteration": at, "time": f"2026-01-01T00:{at // 60:02}:{at % 60:02}", **more}

    first = [line("start", 0), line("summary", 100, wall_time_s=100.0, goodput=0.6, peak_memory_bytes=610820096)]
    killed = [line("start", 200), line("train", 230, lm_loss=1.0)]
    last = [line("start", 300), line("summary", 320, wall_time_s=20.0, goodput=1.0, peak_memory_bytes=610820096)]
    text = render_table([*first, *killed, *last])
    assert "wall_time_s</th><td>150 (2 min 30 s)" in text
    assert "goodput</th><td>0.666667" in text and "peak_memory_bytes</th><td>611 MB" in text
    assert "wall_time_s</th><td>100 (1 min 40 s)" in render_table(first)
