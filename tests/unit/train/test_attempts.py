"""Three attempts without a new checkpoint end a run whose ranks are restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.errors import CheckpointError
from megalite.train.run_directory import ATTEMPTS_FILE, Attempts


def test_the_fourth_attempt_from_one_checkpoint_is_refused_and_the_count_begins_anew(tmp_path: Path) -> None:
    for _ in range(3):
        Attempts(str(tmp_path), "job 1").begin(500)
    with pytest.raises(CheckpointError, match="3 attempts from iteration 500 have failed before a new checkpoint"):
        Attempts(str(tmp_path), "job 1").begin(500)
    Attempts(str(tmp_path), "job 1").begin(500)


@pytest.mark.parametrize("change", ["checkpoint", "launch", "end", "torn file", "nobody restarts"])
def test_what_begins_the_count_anew(change: str, tmp_path: Path) -> None:
    attempts = Attempts(str(tmp_path), "job 1")
    for _ in range(3):
        attempts.begin(500)
    if change == "end":
        attempts.end()
        assert not (tmp_path / ATTEMPTS_FILE).exists()
    if change == "torn file":
        (tmp_path / ATTEMPTS_FILE).write_text('{"launch": "job 1", "iter')
    launch = {"launch": "job 2", "nobody restarts": ""}.get(change, "job 1")
    Attempts(str(tmp_path), launch).begin(600 if change == "checkpoint" else 500)
