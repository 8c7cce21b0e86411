"""What people see while they wait: a bar on a terminal, lines in a log, nothing of what is short."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megalite.checkpoint import verify_checkpoint
from megalite.data.gpt_index import BLOCK, build_sample_index
from megalite.progress import ERASE, ProgressBar, amount, duration
from tests.unit.inference.tiny_checkpoint import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Screen(io.StringIO):
    """A stream that says whether it is a terminal, and breaks if told to."""

    def __init__(self, *, terminal: bool, broken: bool = False) -> None:
        super().__init__()
        self._terminal, self._broken = terminal, broken

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        if self._broken:
            raise BrokenPipeError
        return super().write(text)


def work(screen: Screen, seconds: float, *, step: float = 0.05, total: float | None = 1000.0, **options: float) -> str:
    """Everything that 100 units a second leave on the screen while they are worked on."""
    clock = Clock()
    with ProgressBar("working", "tensors", stream=screen, clock=clock, **options) as bar:
        for number in range(1, round(seconds / step) + 1):
            clock.now = 100.0 + number * step
            bar(100 * number * step, total, "so far well")
    return screen.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_short_work_is_silent(terminal: bool) -> None:
    assert work(Screen(terminal=terminal), 1.95) == ""


def test_a_terminal_has_a_bar_that_is_redrawn_and_goes() -> None:
    shown = work(Screen(terminal=True), 5.0).split(ERASE)
    assert shown[0] == shown[-1] == "" and "\n" not in "".join(shown)
    assert 25 <= len(shown) - 2 <= 31  # 3 s, at most every tenth of one
    assert shown[1] == "working [####----------------] 20 %, 200 of 1,000 tensors, 100/s, 8 s left, so "
    assert re.match(r"working \[#{9,10}-{10,11}\] (49|50) %, ", shown[-2])
    assert all(len(line) < 80 for line in shown)  # no wider than what has 80 columns, where the width is not known


def test_a_log_has_lines_that_are_seldom_and_whole() -> None:
    lines = work(Screen(terminal=False), 9.0, total=1200, lines=3.0).splitlines()
    assert lines == [
        "working: 16 %, 200 of 1,200 tensors, 100/s, 10 s left, so far well",
        "working: 41 %, 500 of 1,200 tensors, 100/s, 7 s left, so far well",
        "working: 66 %, 800 of 1,200 tensors, 100/s, 4 s left, so far well",
    ]


def test_without_a_total_there_is_a_rate_and_more_than_the_total_is_all_of_it() -> None:
    assert work(Screen(terminal=False), 2.1, total=None) == "working: 200 tensors, 100/s, so far well\n"
    assert "100 %, 50 of 50 tensors, 100/s, so far well\n" in work(Screen(terminal=False), 2.1, total=50)


def test_nobody_who_reads_ends_no_work_and_no_lines_means_none() -> None:
    assert work(Screen(terminal=True, broken=True), 5.0) == ""
    assert work(Screen(terminal=True), 5.0, lines=0) == ""


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1234, "1.23 kB"),
        (35.1e6, "35.1 MB"),
        (2.9e9, "2.9 GB"),
        (2.9e12, "2.9 TB"),
        (999_900, "1 MB"),
    ],
)
def test_bytes_are_readable(value: float, text: str) -> None:
    assert amount(value, "B") == text


def test_durations_are_readable() -> None:
    assert [duration(s) for s in (0.4, 59.4, 59.6, 200, 3600, 7500)] == [
        "0 s", "59 s", "1 min 00 s", "3 min 20 s", "1 h 00 min", "2 h 05 min"
    ]  # fmt: skip


def test_an_index_says_how_many_documents_it_has_seen() -> None:
    told: list[tuple[float, float | None, str]] = []
    documents = np.zeros(2 * BLOCK + 7, np.int32)
    build_sample_index(np.array([3], np.int32), documents, 4, on_progress=lambda *done: told.append(done))
    assert told == [(n, len(documents), "") for n in (BLOCK, 2 * BLOCK, 2 * BLOCK + 7)]


def test_verification_says_how_many_bytes_it_has_read(tmp_path: Path) -> None:
    told: list[tuple[float, float | None]] = []
    write_checkpoint(tmp_path)
    assert (
        verify_checkpoint(tmp_path / "iter_0000007", on_progress=lambda done, total, note: told.append((done, total)))
        == []
    )
    done = [n for n, _ in told]
    assert done == sorted(set(done)) and done[-1] <= (told[0][1] or 0) <= done[-1] + 100_000


def test_a_tool_draws_on_a_terminal_and_writes_lines_to_a_pipe(tmp_path: Path) -> None:
    """Through the command line, with the waiting time of the bar set to none."""
    (tmp_path / "a.txt").write_text("some words of text\n" * 20_000)
    program = (
        "import sys; sys.path[:0] = ['tools']; import megalite.progress as p; p.SILENT = 0.0; p.REDRAW = 0.0; "
        "import preprocess_data as t; sys.exit(t.run_tool(t.main))"
    )
    argv = [sys.executable, "-c", program, "--input", str(tmp_path / "a.txt"), "--workers", "1"]
    argv += ["--output-prefix", str(tmp_path / "out")]
    piped = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"tokenising: 100 %, 380 kB of 380 kB, \S+ [kM]B/s, 1 document, \S+ tokens\n", piped.stderr)
    assert "tokenising" not in piped.stdout and "wrote" in piped.stdout
    ours, theirs = pty.openpty()
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
        assert process.wait() == 0
    os.close(ours)
    assert shown.startswith(f"{ERASE}tokenising [{'#' * 20}] 100 %, ".encode()) and shown.endswith(ERASE.encode())
