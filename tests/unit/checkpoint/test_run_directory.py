"""From where a run starts, what is refused, and who holds the directory."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalite.checkpoint import Checkpointer
from megalite.checkpoint.lock import LockHolder, RunLock
from megalite.checkpoint.run_dir import check_names, set_aside_newer
from megalite.checkpoint.start_decision import decide_start
from megalite.comm.mesh import Axis
from megalite.comm.rectangles import TensorShard
from megalite.errors import CheckpointError


def run_in(directory: Path, *steps: int) -> Checkpointer:
    saver = Checkpointer(directory, world=Axis.single("world"))
    for step in steps:
        saver.save(step, [TensorShard("w", (4,), (0,), torch.full((4,), float(step)))], {})
    return saver


def test_where_a_run_starts(tmp_path: Path) -> None:
    a, b, empty = tmp_path / "a", tmp_path / "b", tmp_path / "empty"
    run_in(a, 10, 20)
    run_in(b, 5)
    (empty / "iter_0000003.tmp-x").mkdir(parents=True)
    a10, a20, b5 = a / "iter_0000010", a / "iter_0000020", b / "iter_0000005"

    def start(
        save: Path | None, load: Path | None, *, auto_resume: bool = False, ckpt_step: int | None = None
    ) -> list[Path]:
        texts = (str(path) if path else None for path in (save, load))
        save_text, load_text = texts
        return list(decide_start(save=save_text, load=load_text, auto_resume=auto_resume, ckpt_step=ckpt_step))

    assert start(None, None) == start(empty, None) == start(tmp_path / "new", None) == []
    assert start(None, a) == start(a, a) == start(empty, a) == [a20]
    assert start(a, a, ckpt_step=10) == start(a, a10) == [a10]
    assert start(empty, empty) == []  # the requeue idiom
    assert start(a, None, auto_resume=True) == [a20, a10]
    assert start(empty, None, auto_resume=True) == []
    assert start(a, b, auto_resume=True) == [a20, a10]  # a requeued fine-tuning
    assert start(empty, b, auto_resume=True) == [b5]
    assert start(a, None, auto_resume=True, ckpt_step=10) == [a10]
    refused = [
        (
            a,
            None,
            None,
            f"--save={a}: holds checkpoints already (newest iter_0000020); add --auto-resume or --load {a}",
        ),
        (
            a,
            b,
            None,
            f"--save={a}: holds another run (newest iter_0000020); choose a new directory, or continue that run: "
            f"--auto-resume, or --load {a}",
        ),
        (None, empty, None, "no committed checkpoint (found iter_0000003.tmp-x, interrupted)"),
        (None, tmp_path / "none", None, "no such directory"),
        (empty, None, 5, "--ckpt-step=5: of which run? add --load DIR"),
        (empty, empty, 5, "--ckpt-step=5: no committed checkpoint of that step"),
    ]
    for save, load, step, message in refused:
        with pytest.raises(CheckpointError) as caught:
            start(save, load, ckpt_step=step)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_edited_tracker_is_told_to_be_without_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Megatron-LM goes back by it; where a kill has left an older one, nobody has."""
    run_in(tmp_path, 10, 20)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for text, later, told in (("20", 9, 0), ("10", -9, 0), ("10", 9, 1)):
        tracker.write_text(f"{text}\n")
        at = (tmp_path / "iter_0000020" / "COMMITTED").stat().st_mtime + later
        os.utime(tracker, (at, at))
        decide_start(save=None, load=str(tmp_path))
        assert caplog.text.count("says 10 and is not read: the run starts from iter_0000020") == told
    caplog.clear()
    decide_start(save=None, load=str(tmp_path), ckpt_step=20)
    assert "is not read" not in caplog.text


def test_a_run_in_megatrons_old_format_names_the_converter(tmp_path: Path) -> None:
    (tmp_path / "release" / "mp_rank_00").mkdir(parents=True)
    for trust in (True, False):
        with pytest.raises(CheckpointError, match=r"convert_checkpoint.py --from megatron .* --trust-pickle makes one"):
            decide_start(save=None, load=str(tmp_path), trust_pickle=trust)


def test_auto_resume_passes_over_damaged_checkpoints_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = run_in(tmp_path, 10, 20, 30)
    for step in (20, 30):
        path = tmp_path / f"iter_00000{step}" / "rank_00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        found = saver.decide_start(save=str(tmp_path), load=None, auto_resume=True)
    assert found == tmp_path / "iter_0000010"
    assert "iter_0000030/rank_00000.safetensors: damaged" in caplog.text and "iter_0000020" in caplog.text
    (tmp_path / "iter_0000010" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="--auto-resume: no checkpoint of .* is whole"):
        saver.decide_start(save=str(tmp_path), load=None, auto_resume=True)


def test_going_back_sets_newer_checkpoints_aside(tmp_path: Path) -> None:
    run_in(tmp_path, 10, 20, 30)
    moved = set_aside_newer(tmp_path, 10)
    assert [path.name.split(".aside-")[0] for path in moved] == ["iter_0000020", "iter_0000030"]
    run_in(tmp_path, 20)
    assert all((path / "COMMITTED").exists() for path in moved)


def test_a_checkpoint_that_lost_its_marker_is_told_and_moved_out_of_the_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The older one is taken, and its run comes by the same name again."""
    saver = run_in(tmp_path, 10, 20)
    (tmp_path / "iter_0000020" / "COMMITTED").unlink()
    for how in ({"load": str(tmp_path)}, {"load": None, "auto_resume": True}):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert saver.decide_start(save=str(tmp_path), **how) == tmp_path / "iter_0000010"
        assert "passed over" in caplog.text and "iter_0000020: newer, but it has no COMMITTED file" in caplog.text
    (moved,) = set_aside_newer(tmp_path, 10)
    assert moved.name.startswith("iter_0000020.damaged-")
    run_in(tmp_path, 20)


@pytest.mark.parametrize("flags", [{}, {"auto_resume": True}, {"load": "other"}])
def test_a_name_that_is_taken_is_known_at_the_start(tmp_path: Path, flags: dict) -> None:
    run_in(tmp_path / "other", 5)
    (tmp_path / "save" / "iter_0000020").mkdir(parents=True)
    flags = flags | {"load": str(tmp_path / "other") if "load" in flags else None}
    with pytest.raises(CheckpointError, match="iter_0000020 is in the way and is not a checkpoint"):
        decide_start(save=str(tmp_path / "save"), **flags)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "COMPLETED", "latest_checkpointed_iteration.txt"])
def test_a_directory_in_the_place_of_a_file_is_known_at_the_start(tmp_path: Path, name: str) -> None:
    files = ("metrics.jsonl", "config.yaml")
    (tmp_path / name).touch()
    check_names(tmp_path, files)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError) as caught:
        check_names(tmp_path, files)
    assert caught.value.text == (
        f"`save`={tmp_path}: {name} is a directory, and a run writes a file of that name; move it away"
    )


def test_room_for_a_checkpoint_is_looked_for_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "iter_0000005.tmp-x").mkdir()
    saver = run_in(tmp_path)
    shards = [TensorShard("w", (1000,), (0,), torch.zeros(1000))]
    saver.check_room(shards)
    assert not list(tmp_path.iterdir()), "what an interrupted save has left gives its room back"
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3999))
    with pytest.raises(CheckpointError, match=r"--save=.*: a checkpoint needs ~4 kB, 4 kB free on .*; free some"):
        saver.check_room(shards)


def hurried(lock: RunLock, heartbeat: float, stale_after: float = 120.0) -> RunLock:
    lock.heartbeat, lock.stale_after = heartbeat, stale_after
    return lock


HOLD = """
import sys, time
from megalite.checkpoint.lock import RunLock
RunLock.heartbeat = 0.05
lock = RunLock(sys.argv[1]).acquire()
print("held", flush=True)
time.sleep(60)
"""


def another_process(directory: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_refused_and_a_dead_one_taken_over(tmp_path: Path) -> None:
    other = another_process(tmp_path)
    try:
        with pytest.raises(CheckpointError) as caught:
            RunLock(tmp_path).acquire()
        assert f"--save={tmp_path}: in use by another run (" in str(caught.value)
        assert f"pid {other.pid}, since 20" in str(caught.value)
        other.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # over, but not reaped: it stays a zombie
        with RunLock(tmp_path) as lock:
            assert lock.held
            with pytest.raises(CheckpointError, match=f"pid {os.getpid()}"):
                RunLock(tmp_path).acquire()
        assert list(tmp_path.iterdir()) == []
    finally:
        other.kill()
        other.wait()


def foreign_lock(directory: Path, age: float, **changes: object) -> None:
    value = {**LockHolder.myself().__dict__, "host": "another-host", **changes}
    (directory / "run.lock").write_text(json.dumps(value))
    past = time.time() - age
    os.utime(directory / "run.lock", (past, past))


def test_another_hosts_lock_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    foreign_lock(tmp_path, age=5)
    with pytest.raises(CheckpointError, match=r"another-host, pid \d+, .* last sign of life 5 s ago"):
        RunLock(tmp_path).acquire()
    foreign_lock(tmp_path, age=500)
    with hurried(RunLock(tmp_path), heartbeat=0.02) as lock:
        before = lock.path.stat().st_mtime_ns
        time.sleep(0.2)
        assert lock.path.stat().st_mtime_ns > before, "the heartbeat renews the file"


def test_a_reused_process_number_is_not_the_holder(tmp_path: Path) -> None:
    foreign_lock(tmp_path, age=1, host=LockHolder.myself().host, process_start="12345")
    with RunLock(tmp_path) as lock:
        assert lock.held


def test_an_illegible_lock_is_stale_only_by_age(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("{")
    with pytest.raises(CheckpointError, match="in use by another run"):
        RunLock(tmp_path).acquire()
    os.utime(tmp_path / "run.lock", (1, 1))
    with hurried(RunLock(tmp_path), heartbeat=0.02) as lock:
        assert lock.held


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 121.0, -11.0])
def test_a_live_lock_of_another_host_outlives_a_jump_of_the_clock(tmp_path: Path, jump: float) -> None:
    """The file server's clock has jumped since the last heartbeat; the next one tells that the holder lives."""
    foreign_lock(tmp_path, age=jump)
    beat = threading.Timer(0.15, os.utime, [tmp_path / "run.lock"])
    beat.start()
    with pytest.raises(CheckpointError, match="another-host, .* last sign of life 0 s ago"):
        hurried(RunLock(tmp_path), heartbeat=0.1).acquire()
    beat.join()


def test_a_dead_lock_from_the_future_is_taken_over_at_once(tmp_path: Path) -> None:
    """Not after the hour by which the clock was set back."""
    foreign_lock(tmp_path, age=-3600)
    with hurried(RunLock(tmp_path), heartbeat=0.02) as lock:
        assert lock.held


def test_our_own_clock_does_not_judge_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign_lock(tmp_path, age=5)
    now = time.time
    for jump in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: now() + jump)
        for take in (RunLock(tmp_path).acquire, RunLock(tmp_path).check):
            with pytest.raises(CheckpointError, match="last sign of life 5 s ago"):
                take()


def test_a_lock_that_was_taken_over_is_not_removed_by_its_former_holder(tmp_path: Path) -> None:
    lock = RunLock(tmp_path).acquire()
    foreign_lock(tmp_path, age=0)
    assert not lock.held
    lock.release()
    assert (tmp_path / "run.lock").exists()


def test_a_name_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^--save=.*: cannot be created \(File name too long\); choose another"):
        RunLock(tmp_path / ("n" * 300)).acquire()
