"""`scripts/thousand_kills.py`: killed runs end as one that was not, counts add up, and another state is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/thousand_kills.py", "--folder", str(folder), "--iterations", "40", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_kills_are_counted_once_their_runs_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    short = "--store-seconds", "8", "--host-seconds", "8"
    first = run(tmp_path, "--kills", "2", "--ways", "store", "hosts", *short, "--seed", "1")
    assert first.returncode == 0, first.stderr
    kills = int(first.stdout.splitlines()[-1].split(" kills: ")[0])
    second = run(tmp_path, "--kills", str(kills + 1), "--ways", "host", "host", "--seconds", "4", "--seed", "2")
    assert second.returncode == 0, second.stderr
    last = second.stdout.splitlines()[-1]
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts["waiting"] == {} and {"host", "host2"} & counts["runs"].keys()
    by_way = [sum(hows.values()) for hows in counts["kills"].values()]
    assert last.startswith(f"{sum(by_way)} kills: ") and sum(by_way) > kills, last
    counts["hash"] = "0" * 64
    (tmp_path / "counts.json").write_text(json.dumps(counts))
    third = run(tmp_path, "--kills", "999", "--ways", "host", "--seconds", "4")
    assert third.returncode == 1 and "the state of the undisturbed run" in third.stderr
