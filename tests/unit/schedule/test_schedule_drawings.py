"""Drawings: the picture at the head of each schedule's file is what the program does; SVG, trace and measured runs."""

from __future__ import annotations

import importlib
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from fractions import Fraction

import pytest
from schedule_shapes import build_shape, random_shapes

from megalite.schedule import SCHEDULES, Costs, Timeline, build_program, division_text, partition, simulate
from megalite.schedule.action import Action
from megalite.schedule.drawing.chrome_trace import render_trace
from megalite.schedule.drawing.svg import OPTIMIZER, render_html, render_svg
from megalite.schedule.drawing.text import render_text

EQUAL = Costs(Fraction(1), Fraction(1, 2), Fraction(1, 2))
HEADS = {
    "gpipe": ("gpipe", 3, 3, None, 1),
    "one_f_one_b": ("1f1b", 3, 4, None, 1),
    "eager_1f1b": ("eager-1f1b", 3, 5, None, 1),
    "message_driven": ("message-driven", 3, 5, None, 1),
    "pipedream": ("pipedream", 2, 2, None, 2),
    "pipedream_2bw": ("2bw", 2, 2, None, 3),
    "interleaved": ("interleaved", 2, 4, 2, 1),
    "breadth_first": ("breadth-first", 2, 2, 2, 1),
    "zb_h1": ("zb-h1", 3, 4, None, 1),
    "zb_h2": ("zb-h2", 2, 3, None, 1),
    "zb_v": ("zb-v", 2, 4, None, 1),
    "chimera": ("chimera", 4, 4, None, 1),
    "chimera_doubling": ("chimera-doubling", 4, 8, None, 1),
    "dualpipe_v": ("dualpipe-v", 2, 4, None, 1),
    "shifted_critical_path": ("shifted-critical-path", 3, 3, None, 1),
}


@pytest.mark.parametrize("module", HEADS)
def test_the_drawing_at_the_head_of_the_file_is_the_program(module: str) -> None:
    name, p, m, v, batches = HEADS[module]
    drawing = render_text(simulate(build_program(name, p, m, v), EQUAL if name == "chimera" else None, batches=batches))
    loaded = importlib.import_module(f"megalite.schedule.schedules.{module}")
    assert loaded.SCHEDULE is SCHEDULES[name]
    shown = [line for line in loaded.__doc__.splitlines() if re.match(r"    rank \d+  ", line)]
    assert [line.strip() for line in shown] == drawing.splitlines()
    assert f"p={p}" in loaded.__doc__ and f"m={m}" in loaded.__doc__ and "arXiv:" in loaded.__doc__


def test_every_schedule_has_a_checked_drawing() -> None:
    assert {head[0] for head in HEADS.values()} == set(SCHEDULES)


def test_long_drawings_break_into_blocks() -> None:
    run = simulate(build_program("1f1b", 2, 4))
    assert render_text(build_program("1f1b", 2, 2)) == render_text(simulate(build_program("1f1b", 2, 2)))
    whole, blocks = render_text(run), render_text(run, line_width=30).split("\n\n")
    assert len(blocks) > 1 and all(len(line) <= 30 for block in blocks for line in block.splitlines())
    for rank, line in enumerate(whole.splitlines()):
        pieces = [block.splitlines()[rank].removeprefix(f"rank {rank}  ") for block in blocks]
        assert "".join(pieces).replace(" ", "") == line.removeprefix(f"rank {rank}  ").replace(" ", "")


def test_more_than_two_chunks_name_the_stage() -> None:
    assert "4F0" in render_text(simulate(build_program("interleaved", 2, 2, 3)))


def test_times_without_a_common_unit_are_drawn_to_scale() -> None:
    text = render_text(simulate(build_program("1f1b", 2, 2), Costs(1.03, 0.97, 0.5)), scaled_width=40)
    rows = text.splitlines()
    assert all(len(row) == len("rank 0  ") + 40 for row in rows) or rows[0].startswith("rank 0  FFF")
    assert rows[0].count("F") == pytest.approx(40 * 1.03 / (2 * 2.5 + 2.5), abs=1)


def test_svg_holds_every_action_once_and_nothing_foreign() -> None:
    for name, shape in random_shapes(24, seed=11, largest_rank=4):
        run = simulate(build_shape(name, shape), batches=2)
        text = render_svg(run, title="a < b & c")
        root = ElementTree.fromstring(text)
        titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
        parts = sum(max(len(span.action.parts), 1) for span in run.spans)
        assert len(titles) == parts
        assert {title.split(":")[0] for title in titles} == {str(span.action) for span in run.spans}
        assert "script" not in text and "href" not in text and "a &lt; b &amp; c" in text


def test_svg_boxes_are_where_the_times_are() -> None:
    run = simulate(build_program("1f1b", 2, 2))
    groups = ElementTree.fromstring(render_svg(run)).iter("{http://www.w3.org/2000/svg}g")
    boxes = {}
    for group in groups:
        rect = group.find("{http://www.w3.org/2000/svg}rect")
        title = group.find("{http://www.w3.org/2000/svg}title")
        if rect is not None and title is not None and title.text:
            boxes[title.text.split(":")[0]] = (float(rect.get("x", 0)), float(rect.get("width", 0)))
    scale = (boxes["0F1v0"][0] - boxes["0F0v0"][0]) / 1
    assert boxes["0B0v0"][0] - boxes["0F0v0"][0] == pytest.approx(4 * scale, abs=0.1)
    assert boxes["0B0v0"][1] == pytest.approx(2 * scale, abs=1.5)


def test_html_page() -> None:
    page = render_html(
        [simulate(build_program("1f1b", 2, 2)), simulate(build_program("2bw", 2, 2), batches=3)], heading="plan & run"
    )
    assert page.count("<svg") == 2 and "<h1>plan &amp; run</h1>" in page and page.startswith("<!doctype html>")


def test_trace_of_plan_and_measured_run_side_by_side() -> None:
    plan = simulate(build_program("1f1b", 2, 2))
    spans = [(span.rank, span.action, 100 + float(span.start) / 10, 100 + float(span.end) / 10) for span in plan.spans]
    real = Timeline.measured(spans, title="1f1b")
    assert real.unit == "ms" and float(real.makespan) == pytest.approx(100 * float(plan.makespan))
    assert [float(idle) for idle in real.idle_per_rank] == pytest.approx([300.0, 300.0])
    events = json.loads(render_trace([plan, real]))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"1f1b (simulated)", "1f1b (measured)"}
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert len(slices) == 8 and slices[0]["name"] == "F0 (stage 0)" and slices[0]["dur"] == pytest.approx(100_000)
    assert sum(event["dur"] for event in slices) == pytest.approx(1e5 * float(sum(plan.busy_per_rank)))
    assert sum(event["ph"] == "i" for event in events if event["pid"] == 0) == 2  # the STEPs


def test_measured_runs_are_drawn_like_plans() -> None:
    spans = [
        (0, Action("F", 0, 0), 0.0, 0.011),
        (1, Action("F", 1, 0), 0.012, 0.02),
        (1, Action("B", 1, 0), 0.02, 0.04),
    ]
    run = Timeline.measured(spans, title="real")
    assert "rank 1" in render_text(run) and "<svg" in render_svg(run) and "optimizer step" not in render_svg(run)
    stepped = render_svg(Timeline.measured([*spans, (0, Action("STEP", 0, 0), 0.05, 0.06)]))
    assert OPTIMIZER in stepped and "grey up to ▲: optimizer step" in stepped  # it is no idleness
    assert OPTIMIZER not in render_svg(simulate(build_program("1f1b", 2, 2)))  # a plan's takes no time
    assert run.num_ranks == 2 and run.busy_per_rank == pytest.approx((11.0, 28.0))
    assert Timeline.measured([]).makespan == 0 and "<svg" in render_svg(Timeline.measured([]))


def test_a_picture_says_who_holds_which_layers_and_the_page_how_to_read_it() -> None:
    cuts, division = [range(3), range(3, 4)], "Et*2|L: rank 0 embedding, 2 layers | rank 1 head"
    program = build_program("2bw", 2, 4)
    assert division_text(cuts, program.placement) == division
    page = render_html([replace(simulate(program), division=division)])
    texts = [each.text for each in ElementTree.fromstring(page.split("<figure>")[1].split("</figure>")[0]).iter()]
    assert division in texts
    assert "<b>bubble</b>" in page and "<b>act</b>" in page


def test_a_division_is_short_at_many_stages() -> None:
    cuts = partition(94, build_program("1f1b", 16, 16).placement)
    one = division_text(cuts, build_program("1f1b", 16, 16).placement)
    assert one == (
        "Et*6|(t*6|)*13t*5|t*5L: rank 0 embedding, 6 layers | ranks 1 to 13 6 layers each | rank 14 5 layers | "
        "rank 15 5 layers, head"
    )
    chunked, loop = partition(8, build_program("interleaved", 2, 4, 2).placement), build_program("interleaved", 2, 4, 2)
    text = division_text(chunked, loop.placement)
    assert text == "Ett|(tt|)*2ttL: rank 0 embedding, 2 + 2 layers | rank 1 2 + 2 layers, head".replace("tt", "t*2")
