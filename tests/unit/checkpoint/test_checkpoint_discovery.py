"""Which checkpoint a directory means: by looking, never by the tracker file; what is kept and what is swept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint import Checkpointer, committed, latest, resolve_checkpoint, verify_checkpoint
from megalite.checkpoint.reading import read_manifest
from megalite.checkpoint.run_dir import TRACKER, interrupted
from megalite.comm.mesh import Axis
from megalite.comm.rectangles import TensorShard
from megalite.errors import CheckpointError


def saver_in(directory: Path, **options: int) -> Checkpointer:
    return Checkpointer(directory, world=Axis.single("world"), **options)


def shards(value: float = 1.0) -> list[TensorShard]:
    return [TensorShard("w", (4,), (0,), torch.full((4,), value))]


def steps(directory: Path) -> list[int]:
    return [int(path.name[5:]) for path in committed(directory)]


def test_latest_is_found_by_looking_not_by_the_tracker(tmp_path: Path) -> None:
    saver = saver_in(tmp_path)
    for step in (5, 20, 10_000_000):
        saver.save(step, shards(), {})
    assert (tmp_path / TRACKER).read_text() == "10000000\n"
    (tmp_path / TRACKER).write_text("5")
    (tmp_path / "iter_0000030").mkdir()  # not committed
    (tmp_path / "iter_0000040.tmp-abc").mkdir()
    (tmp_path / "iter_99").mkdir()
    assert steps(tmp_path) == [5, 20, 10_000_000]
    assert latest(tmp_path) == resolve_checkpoint(tmp_path) == tmp_path / "iter_10000000"
    assert (
        resolve_checkpoint(tmp_path, 20) == resolve_checkpoint(tmp_path / "iter_0000020") == tmp_path / "iter_0000020"
    )


def test_errors_say_what_was_found(tmp_path: Path) -> None:
    cases: list[tuple[str, int | None, str]] = []
    cases.append(
        (
            str(tmp_path / "no"),
            None,
            f"--load={tmp_path}/no: no such directory; give a run's --save, or train without --load",
        )
    )
    (tmp_path / "empty").mkdir()
    cases.append(
        (
            str(tmp_path / "empty"),
            None,
            f"--load={tmp_path}/empty: no committed checkpoint (empty); give a run's --save, or train without --load",
        )
    )
    (tmp_path / "torn" / "iter_0000100.tmp-a1f3").mkdir(parents=True)
    cases.append(
        (
            str(tmp_path / "torn"),
            None,
            f"--load={tmp_path}/torn: no committed checkpoint (found iter_0000100.tmp-a1f3, interrupted); "
            "give a run's --save, or train without --load",
        )
    )
    (tmp_path / "foreign" / "iter_0000007").mkdir(parents=True)
    cases.append(
        (
            str(tmp_path / "foreign"),
            None,
            f"--load={tmp_path}/foreign: no committed checkpoint (iter_0000007 has no COMMITTED file: damaged, or "
            "written by another program); give a run's --save, or train without --load",
        )
    )
    saver_in(tmp_path / "run").save(7, shards(), {})
    saver_in(tmp_path / "run").save(9, shards(), {})
    cases.append(
        (str(tmp_path / "run"), 8, f"--ckpt-step=8: no committed checkpoint of that step in {tmp_path}/run (has: 7, 9)")
    )
    for load, step, message in cases:
        with pytest.raises(CheckpointError) as caught:
            resolve_checkpoint(load, step)
        assert str(caught.value) == message


def test_keep_last_and_milestones(tmp_path: Path) -> None:
    saver = saver_in(tmp_path, keep_last=2, retain_interval=30)
    for step in range(10, 80, 10):
        saver.save(step, shards(), {})
        assert step in steps(tmp_path)
    assert steps(tmp_path) == [30, 60, 70]
    saver = saver_in(tmp_path)
    for step in (80, 90):
        saver.save(step, shards(), {})
    assert steps(tmp_path) == [30, 60, 70, 80, 90]


def test_an_existing_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    saver = saver_in(tmp_path)
    first = saver.save(1, shards(1.0), {"n": 1})
    assert saver.save(1, shards(2.0), {"n": 2}) == first  # the same save twice (interval and signal)
    with pytest.raises(CheckpointError, match="iter_0000001 exists and is never overwritten"):
        saver_in(tmp_path).save(1, shards(2.0), {})
    assert read_manifest(Path(first)).meta == {"n": 1}
    assert not interrupted(tmp_path)


def test_leftovers_are_swept_by_the_first_save_of_a_run(tmp_path: Path) -> None:
    saver_in(tmp_path).save(1, shards(), {})
    for name in ("iter_0000002.tmp-a1", "iter_0000001.tmp-deleted-77"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_00000.safetensors").write_bytes(b"half")
    (tmp_path / "notes.tmp-1").mkdir()
    saver_in(tmp_path).save(3, shards(), {})
    assert steps(tmp_path) == [1, 3]
    assert not interrupted(tmp_path) and (tmp_path / "notes.tmp-1").is_dir()


def test_async_save_stores_the_state_at_the_call(tmp_path: Path) -> None:
    saver = saver_in(tmp_path)
    values = torch.arange(6.0).view(2, 3)
    views = [TensorShard("w", (2, 3), (0, 0), values), TensorShard("t", (3, 2), (0, 0), values.t())]
    for step in (1, 2):  # the second save reuses the first one's memory
        values.fill_(step)
        path = saver.save(step, views, {"step": step}, background=True)
        values.fill_(-1)
        if step == 2:
            assert (tmp_path / "iter_0000001" / "COMMITTED").exists(), "one save in flight at most"
    saver.wait()
    assert saver.failure is None and path == latest(tmp_path)
    for step in (1, 2):
        out = [TensorShard(v.name, v.global_shape, v.offset, torch.zeros(v.global_shape)) for v in views]
        assert saver.load(tmp_path / f"iter_{step:07d}", out) == {"step": step}
        assert all((shard.local == step).all() for shard in out)
    names = {p.name for p in path.iterdir()}
    assert names == {"rank_00000.safetensors", "manifest.json", "COMMITTED"}


def test_a_failed_async_save_is_reported_by_the_next_call(tmp_path: Path) -> None:
    saver = saver_in(tmp_path)
    saver.save(1, shards(), {})
    saver.save(2, shards(), {"not json": float("nan")}, background=True)
    with pytest.raises(CheckpointError, match="not JSON"):
        saver.save(3, shards(), {})
    assert steps(tmp_path) == [1] and not interrupted(tmp_path)
    saver.save(3, shards(), {}, background=True)
    saver.wait()
    assert steps(tmp_path) == [1, 3]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"model.pt": b"PK\x03\x04rest"}, "pickles of torch.save"),
        ({"pytorch_model-00001-of-2.bin": b"PK\x03\x04"}, "pickles of torch.save"),
        ({"step_5/model.pth": b"\x80\x02"}, "pickles of torch.save"),
        ({".metadata": b"\x80\x04", "__0_0.distcp": b"PK"}, "torch's distributed format"),
        ({"iter_0000100/.metadata": b"", "iter_0000100/__0_0.distcp": b"PK"}, "torch's distributed format"),
        ({"model.safetensors": b"\x08\0\0\0\0\0\0\0{}"}, "safetensors without config.json"),
        ({"model.safetensors": b"\x08\0\0\0\0\0\0\0{}", "manifest.json": b"{}"}, "it has no COMMITTED file: damaged"),
        ({"iter_0000100/mp_rank_00/model_optim_rng.pt": b"PK"}, "Megatron-LM's"),
        ({"corpus.bin": b"\0\0", "corpus.idx": b"\0"}, "no committed checkpoint;"),
    ],
)
def test_a_folder_of_another_format_is_called_what_it_is(files: dict[str, bytes], words: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "model.pt",
            b"PK\x03\x04",
            r"is a file \(a pickle, torch.save's\? it could execute code and is not read; save",
        ),
        ("whatever", b"\x80\x02}", r"is a file \(a pickle"),
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}", r"is a file \(safetensors: name the folder"),
        ("notes.txt", b"hello", "is a file; give"),
        ("empty.pt", b"", r"is a file \(a pickle"),
    ],
)
def test_a_file_in_place_of_a_directory_is_called_what_it_is(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        resolve_checkpoint(tmp_path / name)


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saver_in(tmp_path).save(5, shards(), {})
    opened = os.open

    def refuse(name: str | Path, *rest: Any, **more: Any) -> int:
        if str(name).endswith(".safetensors"):
            raise PermissionError(13, "Permission denied")
        return opened(name, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    (problem,) = verify_checkpoint(path)
    assert problem == (
        f"{path}/rank_00000.safetensors: cannot be read (Permission denied); the checkpoint may be whole, give this "
        "user the right to read it"
    )


def test_a_folder_whose_parent_may_not_be_read_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(CheckpointError, match=r"^--load=/a/b: cannot be read \(Permission denied\)$"):
        resolve_checkpoint("/a/b")
