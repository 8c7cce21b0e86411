"""tools/show_schedule.py: flags, JSON keys, formats, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.schedule import SCHEDULES, build_program, load_program
from tools.show_schedule import main


def shape(p: int, m: int) -> list[str]:
    return ["--pipeline-model-parallel-size", str(p), "--num-microbatches", str(m)]


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main([*argv, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    facts = as_json(capsys, "--schedule", "1f1b", *shape(4, 8))
    assert facts["makespan"] == 33 and facts["idle_per_rank"] == [9] * 4
    assert facts["idle_inside_per_rank"] == [9, 6, 3, 0]
    assert facts["bubble_over_ideal"] == pytest.approx(3 / 8) and facts["bubble_over_total"] == pytest.approx(3 / 11)
    assert facts["peak_activations_per_rank"] == [4, 3, 2, 1] and facts["weight_versions"] == 1


def test_costs_change_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--schedule", "1f1b", *shape(2, 4)]
    assert as_json(capsys, *base)["makespan"] == 15
    assert as_json(capsys, *base, "--cost-forward", "2")["makespan"] == 20
    assert as_json(capsys, *base, "--cost-backward-input", "1.5")["makespan"] == 17.5
    assert as_json(capsys, *base, "--cost-backward-weight", "0")["makespan"] == 10
    assert as_json(capsys, *base, "--cost-communication", "0.5")["makespan"] > 15


def test_asynchronous_schedules_show_several_batches(capsys: pytest.CaptureFixture[str]) -> None:
    facts = as_json(capsys, "--schedule", "2bw", *shape(4, 4))
    assert facts["num_batches"] == 4 and facts["idle_per_rank"] == [9] * 4 and facts["weight_versions"] == 2
    assert as_json(capsys, "--schedule", "2bw", *shape(4, 4), "--num-batches", "10")["makespan"] == 129
    assert as_json(capsys, "--schedule", "pipedream", *shape(4, 4))["weight_versions_per_rank"] == [4, 3, 2, 1]


def test_a_bubble_without_a_flush_says_of_how_many_batches_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The drawing has four, the comparison eight: two figures for one schedule, both explained."""
    assert main(["--schedule", "2bw", *shape(4, 8)]) == 0
    drawn = capsys.readouterr().out
    assert (
        "bubble          8.6% of the time, 9.4% of the work; the pipeline fills once in 4 batches, and in more" in drawn
    )
    assert main(["--compare", "1f1b,2bw", *shape(4, 8)]) == 0
    table = capsys.readouterr().out
    assert "8 batches (a schedule without a flush fills the pipeline once in all of them, --num-batches)" in table
    assert main(["--schedule", "1f1b", *shape(4, 8), "--num-batches", "4"]) == 0
    assert "fills once" not in capsys.readouterr().out
    assert main(["--compare", "1f1b,gpipe", *shape(4, 8), "--num-batches", "4"]) == 0
    assert "without a flush" not in capsys.readouterr().out


def test_chunks_and_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    chunks = ["--virtual-pipeline-model-parallel-size", "3"]
    assert as_json(capsys, "--schedule", "interleaved-1f1b", *shape(4, 8), *chunks)["idle_per_rank"] == [3] * 4
    facts = as_json(capsys, "--schedule", "chimera", *shape(8, 8), "--chimera-pairs", "2")
    assert facts["weight_copies"] == 4 and facts["weight_versions"] == 1


@pytest.mark.parametrize(("room", "come"), [("1", "15/15 13/13"), ("4", "4/15 4/13"), ("9", "4/15 4/13")])
def test_weights_that_come_from_the_host(room: str, come: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Four layers: rank 0 reads 0123 0123 3210 3210, rank 1 0123 3210 0123 3210; twice in a row is one use."""
    assert main(["--schedule", "1f1b", *shape(2, 2), "--weight-capacity", room]) == 0
    assert f"weights         layers that come, of the uses of a batch: {come}\n" in capsys.readouterr().out


def test_text_is_the_drawing_and_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedule", "gpipe", *shape(2, 2)]) == 0
    text = capsys.readouterr().out
    assert "rank 0  F0 F1 .. .. .. B0-B0 B1-B1\nrank 1  .. F0 F1 B0-B0 B1-B1 .. ..\n" in text
    assert "bubble          33.3% of the time, 50.0% of the work" in text


@pytest.mark.parametrize(("kind", "start"), [("svg", "<svg"), ("html", "<!doctype html>"), ("trace", '{"traceEvents"')])
def test_formats_go_to_a_file(tmp_path: Path, kind: str, start: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"picture.{kind}"
    assert main(["--schedule", "zbv", *shape(2, 4), "--format", kind, "--output", str(path)]) == 0
    assert path.read_text().startswith(start) and capsys.readouterr().out == f"wrote {path}\n"


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.svg", "<svg"), ("a.HTML", "<!doctype html>"), ("a.json", '{\n  "schedule"'), ("a.txt", "1F1B"), ("a", "1F1B")],
)
def test_the_name_of_the_file_says_its_format(
    tmp_path: Path, name: str, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    assert main(["--schedule", "1f1b", *shape(2, 4), "--output", str(path)]) == 0
    assert path.read_text().startswith(start) and capsys.readouterr().out == f"wrote {path}\n"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--output a.png", "--output=a.png: .png is not a format of this tool; end it in .svg, .html, .json or .txt"),
        ("--output a.svg --format text", "--output=a.svg: --format=text writes no .svg; use --format=svg, or drop it"),
    ],
)
def test_no_file_of_another_format_than_its_name(
    flags: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--schedule", "1f1b", *shape(2, 4), *flags.split()]) == 2
    assert capsys.readouterr().err == f"error: {line}\n" and not list(tmp_path.iterdir())


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--compare", "gpipe,1f1b,2bw,interleaved,zb-h2", *shape(4, 4)]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines()[1:]}
    assert rows["gpipe"][2] == rows["1f1b"][2] == "21"
    assert float(rows["2bw"][2]) < float(rows["interleaved"][2]) < 21
    assert "zb-h2: --schedule=zb-h2: m = 4" in out
    table = as_json(capsys, "--compare", "all", *shape(4, 8))
    assert len(table) == 15 and all("refused" in row or row["num_batches"] == 8 for row in table)
    # With exact clipping the zero-bubble schedules pay their skew per batch, 2BW hides the norm in its slack.
    per_batch = {row["schedule"]: row["makespan_per_batch"] for row in table}
    assert per_batch["2bw"] == pytest.approx(24 + 9 / 8) and per_batch["zb-v"] == 25.5 and per_batch["zb-h2"] == 27


def test_refusals_end_with_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--schedule", "2bw", *shape(4, 2)]) == 2
    assert "m >= p-1 = 3" in capsys.readouterr().err
    assert main(["--schedule", "1f2b", *shape(4, 2)]) == 2
    assert "no such schedule" in capsys.readouterr().err
    assert main(["--compare", "1f1b,nope"]) == 2
    assert main(["--compare", "1f1b", "--format", "svg"]) == 2
    assert main(["--pipeline-schedule-file", str(tmp_path / "none.txt")]) == 2
    capsys.readouterr()
    wrong = {
        ("--cost-forward", "-1"): "error: --cost-forward: -1: a time cannot be negative\n",
        ("--output", "none/a.txt"): "error: --output=none/a.txt: cannot be written (No such file or directory); "
        "choose another\n",
        ("--schedul", "1f1b"): "error: unknown flag --schedul; did you mean --schedule?\n",
        tuple(
            shape(4, 10**6)
        ): "error: --num-microbatches=1000000: on 4 ranks these are 4,000,000 forwards, at most 16,384 "
        "can be shown; show fewer, a schedule repeats itself\n",
        ("--layers-per-stage", "3"): "error: --layers-per-stage=3: needs --weight-capacity\n",
        ("--weight-capacity", "0"): "error: --weight-capacity=0: at least 1\n",
        (
            "--schedule",
            "2bw",
            *shape(4, 4),
            "--weight-capacity",
            "2",
        ): "error: --weight-capacity: 2bw keeps two versions of its weights; use --schedule=1f1b\n",
        tuple(shape(4, 0)): "error: --schedule=1f1b: micro-batches per batch = 0, must be 1 or more\n",
    }
    for flags, line in wrong.items():
        assert main(["--schedule", "1f1b", *flags]) == 2
        assert capsys.readouterr().err == line


def test_refusals_name_the_flags_of_this_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedule", "zb-h1", *shape(4, 2)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --schedule=zb-h1: ") and "raise --num-microbatches, or use --schedule=1f1b" in error


def test_the_price_of_no_slack_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedule", "2bw", *shape(4, 3)]) == 0
    assert "warning: --schedule=2bw: m = p-1 = 3 leaves no slack" in capsys.readouterr().err


def test_own_schedule_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.txt"
    path.write_text("name: own\nranks: 1\nstages: 0\nmicrobatches: 2\nrank 0: 0F0 0B0 0F1 0I1 0W1\n")
    own = ["--pipeline-schedule-file", str(path)]
    assert as_json(capsys, *own)["makespan"] == as_json(capsys, *own, *shape(1, 2))["makespan"] == 6
    further = ["--virtual-pipeline-model-parallel-size", "2", "--chimera-pairs", "1"]
    assert main([*own, *shape(4, 8), *further]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: --pipeline-model-parallel-size=4: {path} is written for 1 ranks; drop the flag",
        f"error: --num-microbatches=8: {path} is written for 2 micro-batches per batch; drop the flag",
        f"error: --virtual-pipeline-model-parallel-size=2: {path} is written for 1 chunks per rank; drop the flag",
        f"error: --chimera-pairs=1: {path} says which rank computes what; drop the flag",
    ]


def test_a_schedule_goes_by_its_name_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    facts = as_json(capsys, "--pipeline-schedule", "zb-v", *shape(4, 8))
    assert facts == as_json(capsys, "--schedule", "zb-v", *shape(4, 8))


def test_a_file_that_the_tool_writes_is_the_schedule(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    assert main(["--schedule", "zb-h1", *shape(3, 5), "--format", "file", "--output", str(path)]) == 0
    assert load_program(path).unroll(2) == build_program("zb-h1", 3, 5).unroll(2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_gallery_in_the_docs_is_what_the_tool_draws(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedule", name, *shape(4, 8), "--format", "svg"]) == 0
    page = Path(__file__).parents[3] / "docs" / "schedules" / f"{name}.svg"
    assert page.read_text(encoding="utf-8") == capsys.readouterr().out
