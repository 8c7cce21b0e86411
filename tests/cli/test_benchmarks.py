"""The benchmarks run, their records are legal, `--check` tells worse from as good, and the page is what they say."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, write_tables
from benchmarks.harness import Benchmark, case_record
from benchmarks.turns import Case, Place, Samples, measure, take_turns
from megalite.comm.world import World
from megalite.errors import ConfigError, RuntimeFailure
from megalite.testing import run_ranks, run_single
from tests.cli.fake_benchmark import FAKE, fake_build

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "single": "--models tiny --tokens 64 --compile no",
    "tensor": "--model tiny",
    "data": "--model tiny --memory-model small",  # of a tiny one a process shows nothing
    "pipeline": "--model tiny --num-microbatches 2",
    "checkpoint": "--megabytes 1",
    "tokens": "--megabytes 0.05 --documents 100 --workers 1",
    "attention": "--lengths 16",
    "context": "--length 64",
    "experts": "--tokens 64",
    "generation": "--model tiny --sequences 4 --prompt 4 --new 4",
    "tiers": "--milliseconds 8 --ratios 1",
    "waiting": "--ranks 2 --num-microbatches 2 --forward-ms 1",
    "unlike_stages": "--unit-ms 1 --cases two",
}
# What a warm process measures in tenths of a second: variants of the first case.
CHEAP = {
    "attention": ("megalite", "sdpa", "plain"),
    "tensor": ("megalite-tp", "megalite-one"),
    "single": ("megalite", "plain"),
    "pipeline": ("megalite-2bw", "ideal"),
    "checkpoint": ("megalite",),
    "data": ("megalite-zero1", "plain"),
    "context": ("megalite-one", "megalite-p2p", "torch"),
    "generation": ("megalite-one", "megalite-pp"),
    "tiers": ("megalite", "in-turns"),
    "waiting": ("megalite-2bw", "bound"),
    "unlike_stages": ("megalite-1+1:t|t", "plan"),
}


def benchmark(name: str) -> Benchmark:
    found: Benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    return found


def check_case(case: dict[str, Any], names: tuple[str, ...]) -> None:
    """Every variant has its repetitions, whose median is told; ratios are finite and above 0."""
    assert not case["errors"] and tuple(case["variants"]) == names
    for found in case["variants"].values():
        values = found.get("seconds") or found["process_mib"]
        assert values and found["lowest"] <= found["median"] <= found["highest"]
        assert all(math.isfinite(value) and value >= 0 for value in values)
    assert all(0 < ratio["median"] < math.inf for ratio in case["ratios"].values())
    assert json.loads(json.dumps(case, allow_nan=False)) == case


def body_turns(world: World, name: str, folder: str) -> dict[str, Any]:
    script = benchmark(name)
    case = script.cases(script.parse(["--quick", *TINY[name].split()]))[0]
    case = harness._only(case, CHEAP[name])
    begun: list[str] = []
    place = Place(world.rank, world.size, folder)
    kept: list[Samples] = []
    take_turns(place, case, script.build, 2, begun.append, lambda text: None, kept.append)
    assert set(begun) == set(case.variants)
    return case_record(case, kept[-1])


@pytest.mark.in_turn
@pytest.mark.parametrize("name", CHEAP)
def test_a_tiny_case_of_each_is_measured(name: str, tmp_path: Path) -> None:
    if name in ("single", "attention", "tiers"):
        case = run_single(body_turns, name, str(tmp_path))
    else:
        case = run_ranks(body_turns, 2, name, str(tmp_path))[0]
    names = tuple(variant for variant in benchmark(name).variants if variant in CHEAP[name])
    check_case(case, tuple(case["variants"]))
    assert set(case["variants"]) == set(names)


@pytest.mark.full
@pytest.mark.parametrize("name", TINY)
def test_each_script_runs_alone_and_writes_its_record(name: str, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--quick", "--rounds", "2", "--json", str(out)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*command, *TINY[name].split()], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    script = benchmark(name)
    cases = script.cases(script.parse(["--quick", *TINY[name].split()]))
    assert record["benchmark"] == name and record["versions"]["torch"] and record["machine"]["cores"] == os.cpu_count()
    assert [case["name"] for case in record["cases"]] == [case.name for case in cases]
    for found, case in zip(record["cases"], cases, strict=True):
        check_case(found, tuple(found["variants"]))
        assert set(found["variants"]) == set(case.variants) and len(found["ratios"]) >= len(case.pairs)


@pytest.mark.landing
def test_a_variant_that_fails_or_dies_leaves_the_others(tmp_path: Path) -> None:
    case = Case("case", ("megalite", "raises", "dies", "peer"), settings={"torch": False})
    kept: list[Samples] = []
    found = measure(case, fake_build, rounds=3, timeout=60, tell=lambda text: None, keep=kept.append)
    assert [len(samples.seconds) for samples in kept] == [2], "on a CPU when all have had their turns"
    assert {name: len(seconds) for name, seconds in found.seconds.items()} == {"megalite": 3, "peer": 3}
    assert found.errors == {"raises": "ValueError: what it said", "dies": "rank 0 ended with status 3"}


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = (
        "from benchmarks.turns import Case, measure; from tests.cli.fake_benchmark import fake_build; "
        f"case = Case('case', ('waits',), settings={{'torch': False, 'pid': {str(pid)!r}}}); "
        "measure(case, fake_build, rounds=1, timeout=60, tell=print, keep=print)"
    )
    started = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.02)
    rank = Path("/proc") / pid.read_text().strip()
    assert rank.exists()
    started.kill()
    started.wait()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while "State:\tZ" not in (rank / "status").read_text():  # gone, or waiting to be noticed
            assert time.monotonic() < deadline, "the rank continues alone"
            time.sleep(0.02)


def test_a_ratio_is_the_median_of_rounds_the_peer_over_ours() -> None:
    case = Case("case", ("megalite", "peer"), (("megalite", "peer"),), base="peer", work=10, unit="tokens")
    samples = Samples(seconds={"megalite": [1.0, 2.0, 4.0], "peer": [3.0, 2.0, 16.0]})
    record = case_record(case, samples)
    assert record["ratios"]["megalite / peer"] == {"median": 3.0, "lowest": 1.0, "highest": 4.0, "of_lowest": 2.0}
    assert record["variants"]["megalite"]["rate"] == 5.0  # tokens a second at the median
    memory = replace(case, memory=True, unit="")
    record = case_record(memory, Samples(process_bytes={"megalite": [2 * 2**20], "peer": [5 * 2**20]}))
    assert record["ratios"]["megalite / peer"]["median"] == 2.5 and record["unit"] == "MiB"


def test_check_names_each_row_that_is_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = {"megalite": [1.0, 1.0], "peer": [1.5, 1.5]}
    monkeypatch.setattr(harness, "BASELINE", tmp_path / "baseline.json")
    monkeypatch.setattr(harness, "measure", lambda *args, **kwargs: Samples(seconds=seconds))
    with pytest.raises(ConfigError, match="--check: .*no row for little: megalite / peer"):
        FAKE.run(["--check"])
    FAKE.run(["--write-baseline"])
    rows = json.loads((tmp_path / "baseline.json").read_text())["fake"]["rows"]
    assert rows == {"little: megalite / peer": {"ratio": 1.5, "tolerance": 0.15}}
    seconds["megalite"] = [1.15, 1.15]  # 1.304: not 15 % worse
    FAKE.run(["--check"])
    assert "1 ratios, none worse" in capsys.readouterr().out
    seconds["megalite"] = [1.3, 1.3]
    told = r"^fake: little: megalite / peer: 1\.154 \(of the fastest repetitions 1\.154\), worse than 1\.500 less 15%$"
    with pytest.raises(RuntimeFailure, match=told):
        FAKE.run(["--check"])
    seconds["megalite"] = [1.0, 9.0, 9.0]  # a neighbour came by; our fastest is as fast as before
    seconds["peer"] = [1.5, 1.5, 1.5]
    FAKE.run(["--check"])
    FAKE.run(["--write-baseline"])  # rounds from 0.167 to 1.5, their median 0.167: as tolerant as it gets
    row = json.loads((tmp_path / "baseline.json").read_text())["fake"]["rows"]["little: megalite / peer"]
    assert row == {"ratio": 0.167, "tolerance": 0.5}
    with pytest.raises(ConfigError, match="no row for other: "):
        FAKE.run(["--check", "--size", "other"])


def test_a_record_that_was_cut_off_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may be lent for an hour: cases are written one by one, and those that are there are not repeated."""
    out, calls = tmp_path / "record.json", []

    def measured(case: Case, *args: Any, **kwargs: Any) -> Samples:
        calls.append(case.name)
        return Samples(seconds={"megalite": [1.0 * len(calls)], "peer": [3.0]})

    monkeypatch.setattr(harness, "measure", measured)
    for _ in range(2):
        FAKE.run(["--quick", "--json", str(out), "--resume"])
    record = json.loads(out.read_text())
    assert calls == [case["name"] for case in record["cases"]]
    assert record["cases"][0]["variants"]["megalite"]["median"] == 1.0
    with pytest.raises(ConfigError, match="--resume: .*is of another setting"):
        FAKE.run(["--quick", "--json", str(out), "--resume", "--size", "other"])
    with pytest.raises(ConfigError, match="--resume: needs the record"):
        FAKE.run(["--quick", "--resume"])


def test_the_rows_of_the_baseline_are_the_ratios_of_quick() -> None:
    baseline = harness.read_baseline()
    assert baseline.keys() <= TINY.keys()
    for name, entry in baseline.items():
        script = benchmark(name)
        cases = script.cases(script.parse(["--quick"]))
        asked = {f"{case.name}: {ours} / {peer}" for case in cases for ours, peer in case.pairs}
        assert harness.baseline_rows(name, cases).keys() == asked and entry["machine"]["cpu"]
        assert all(row["ratio"] > 0 and 0 < row["tolerance"] < 1 for row in entry["rows"].values())


def test_the_page_is_what_the_records_say() -> None:
    assert write_tables.main(["--check"]) == 0, "run python benchmarks/write_tables.py"
    text = write_tables.PAGE.read_text()
    tables = write_tables.TABLE.findall(text)
    lines = text.splitlines()
    heads = [number for number, line in enumerate(lines[1:], 1) if line.startswith("| --- ")]
    assert len(heads) == len(tables) >= 9, "a table of the page that is written by hand"
    record = json.loads((write_tables.RESULTS / "tensor.json").read_text())
    rate = record["cases"][0]["variants"]["megalite-tp"]["rate"]
    assert write_tables.page_with_tables(text.replace(f"| {rate:,.0f} |", "| 1 |")) == text
