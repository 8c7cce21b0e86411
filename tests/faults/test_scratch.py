"""Killed launchers leave nothing forever: the next one removes what has no owner, and nothing else."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megalite import scratch
from megalite.data import cache
from megalite.data.cache import cached_folder
from megalite.errors import ConfigError
from megalite.scratch import remove_forgotten, scratch_folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def hold_and_wait(root: Path) -> int:
    """Forks a launcher; its folder exists when this returns."""
    pid = os.fork()
    if pid == 0:
        with scratch_folder():
            (root / "ready").touch()
            time.sleep(60)
        os._exit(0)
    while not (root / "ready").exists():
        time.sleep(0.005)
    (root / "ready").unlink()
    return pid


def test_the_folder_of_a_killed_launcher_is_removed_by_the_next(root: Path) -> None:
    pid = hold_and_wait(root)
    (left,) = root.iterdir()
    try:
        with scratch_folder() as mine:
            assert {*root.iterdir()} == {left, mine}, "its owner lives"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with scratch_folder() as mine:
        assert [*root.iterdir()] == [mine]
    assert not [*root.iterdir()]


def test_only_what_is_ours_and_forgotten_is_removed(root: Path) -> None:
    for name in ("megalite-launch-old", "megalite-launch-new", "megalite-launch-strange", "other"):
        (root / name).mkdir()
    (root / "megalite-launch-strange" / "work.txt").touch()
    (root / "megalite-launch-link").symlink_to(root / "other")
    (root / "megalite-12-x").touch()
    (root / "megalite-benchmark-x").mkdir()  # empty and old, of a program that may still run
    for path in root.iterdir():
        if path.name != "megalite-launch-new":
            os.utime(path, (1, 1), follow_symlinks=False)
    with scratch_folder():
        pass
    left = {"megalite-launch-new", "megalite-launch-strange", "other", "megalite-launch-link", "megalite-12-x"}
    left |= {"megalite-benchmark-x"}
    assert {path.name for path in root.iterdir()} == left
    remove_forgotten(root)
    assert {path.name for path in root.iterdir()} == left - {"megalite-12-x"}


def test_our_clock_does_not_say_what_is_forgotten(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be set anew, and a file server has one of its own."""
    (root / "megalite-launch-new").mkdir()
    (root / "megalite-12-new").touch()
    (root / "data").mkdir()
    monkeypatch.setattr(cache, "KEPT_SECONDS", 3600.0)
    (root / "data" / "index.partial").mkdir()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 2 * scratch.FORGOTTEN_SECONDS)
    with scratch_folder():
        remove_forgotten(root)
    cached_folder(root / "data", "other", lambda folder: None)
    assert {path.name for path in root.iterdir()} == {"megalite-launch-new", "megalite-12-new", "data"}
    assert (root / "data" / "index.partial").exists()


def test_a_temporary_directory_that_can_not_be_written_is_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(root / "none"))
    with pytest.raises(ConfigError, match="env: TMPDIR: cannot be written .*; point it to another folder"):
        with scratch_folder():
            pass
