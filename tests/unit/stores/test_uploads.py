"""What is staged on its way to a store stays until all of it is committed, and what is given up can be kept."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.checkpoint import Checkpointer, committed
from megalite.checkpoint.background import PendingSave, PendingSaves
from megalite.comm.mesh import Axis
from megalite.comm.rectangles import TensorShard
from megalite.errors import CheckpointError
from megalite.stores import StoreUrl


def staged(
    uploads: PendingSaves, folder: Path, step: int, *, sent: bool, report: dict[str, Any] | None = None
) -> PendingSave:
    job: Any = SimpleNamespace(step=step, rank=1, staging=folder / str(step), save_id="0" * 12)
    job.final = StoreUrl("memory", "b", f"iter_{step:07d}")
    job.staging.mkdir()
    upload = PendingSave(job, lambda: None)
    upload.sent, upload.report = sent, report
    uploads._waiting.append(upload)
    return upload


@pytest.mark.parametrize(("oldest", "left"), [(20, ["20", "30"]), (10, ["10", "20", "30"]), (None, ["30"])])
def test_a_part_stays_until_rank_0_has_committed_it(tmp_path: Path, oldest: int | None, left: list[str]) -> None:
    """Its oldest save says up to where: the parts of later ones may be sent, and the save fail all the same."""
    uploads = PendingSaves(1, 2)
    for step in (10, 20, 30):
        staged(uploads, tmp_path, step, sent=step < 30)
    uploads.forget(oldest)
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert [str(upload.job.step) for upload in uploads._waiting] == left


def test_the_newest_save_that_is_staged_is_kept_of_those_that_are_given_up(tmp_path: Path) -> None:
    uploads = PendingSaves(1, 2)
    ten, twenty, thirty = (staged(uploads, tmp_path, step, sent=False, report={"step": step}) for step in (10, 20, 30))
    thirty.report = {"error": "no space left"}
    staged(uploads, tmp_path, 40, sent=False)  # not staged yet
    assert uploads.give_up() == (twenty.job, {"step": 20})
    assert all(upload.final for upload in uploads._waiting), "nothing of it is sent any more"
    assert not uploads._advance(ten)
    assert PendingSaves(1, 2).give_up() is None


def test_the_next_save_waits_for_room_but_not_for_one_that_is_tried_again(tmp_path: Path) -> None:
    uploads = PendingSaves(1, 2)
    uploads.wait_for_room()
    first = staged(uploads, tmp_path, 10, sent=False)
    uploads.wait_for_room()
    staged(uploads, tmp_path, 20, sent=False)
    waits = threading.Thread(target=uploads.wait_for_room)
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()
    first.failed = 1
    waits.join(5)
    assert not waits.is_alive()


def test_reports_that_are_handed_over_need_no_listing(tmp_path: Path) -> None:
    """That of a network file system can be older than what lies there."""
    saves, committed_of = PendingSaves(0, 2), list[Any]()
    save = staged(saves, tmp_path, 10, sent=True, report={"rank": 0})
    save.job.__dict__.update(rank=0, final=tmp_path / "iter_0000010", commit=committed_of.append)
    assert not save.commit(2)
    saves.hand_over([saves.reports, []])
    assert not save.commit(2), "one rank has not reported"
    saves.hand_over([saves.reports, [(10, {"rank": 1})]])
    assert save.commit(2) and committed_of == [[{"rank": 0}, {"rank": 1}]]


def test_a_save_to_a_disk_that_fails_at_once_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that is known before `save` returns; the saver can be used again."""
    saver, shards = Checkpointer(tmp_path, world=Axis.single("world")), [TensorShard("w", (4,), (0,), torch.ones(4))]
    add = saver.pending.add

    def add_and_wait(*job: Any, background: bool) -> PendingSave:
        save = add(*job, background=background)
        while not save.final:
            time.sleep(0.01)
        return save

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("megalite.checkpoint.saving.write_shard_file", fails)
        patch.setattr(saver.pending, "add", add_and_wait)
        saver.save(1, shards, {}, background=True)
        with pytest.raises(CheckpointError, match="No space left on device"):
            saver.wait()
    assert list(tmp_path.iterdir()) == []
    saver.save(1, shards, {}, background=True)
    saver.wait()
    assert [path.name for path in committed(tmp_path)] == ["iter_0000001"]
