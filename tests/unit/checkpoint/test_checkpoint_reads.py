"""What a system does to readers and writers: short reads, read errors, pipes, disks that forget what nobody synced."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint import Checkpointer, storage, verify_checkpoint
from megalite.checkpoint.lock import RunLock
from megalite.comm.mesh import Axis
from megalite.comm.rectangles import TensorShard
from megalite.errors import CheckpointError

BLOCK = 4096
ROWS, COLUMNS = 40, 100  # 16,000 bytes: three blocks and the part of a fourth


def saver(directory: Path) -> Checkpointer:
    return Checkpointer(directory, world=Axis.single("world"), block_bytes=BLOCK)


def shard(name: str, value: float = 1.0) -> TensorShard:
    return TensorShard(name, (ROWS, COLUMNS), (0, 0), torch.full((ROWS, COLUMNS), value))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    names = ("a", "b", "optimizer/exp_avg/a", "previous/a")
    return saver(tmp_path).save(1, [shard(name) for name in names], {})


def load(path: Path, *names: str) -> list[TensorShard]:
    wanted = [shard(name, 0.0) for name in names]
    saver(path.parent).load(path, wanted)
    return wanted


def whole(shards: list[TensorShard]) -> bool:
    return all(bool(torch.all(shard.local == 1.0)) for shard in shards)


def test_a_flip_in_any_block_of_a_rectangle_is_seen(saved: Path) -> None:
    path, rng = saved / "rank_00000.safetensors", random.Random(1)
    content = path.read_bytes()
    first = len(content) - 4 * ROWS * COLUMNS * 4  # of "a": four equal rectangles lie behind the header
    for block in range(4):
        flipped = bytearray(content)
        flipped[first + min(block * BLOCK + rng.randrange(BLOCK), ROWS * COLUMNS * 4 - 1)] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=path.name):
            load(saved, "a", "b")
        assert len(verify_checkpoint(saved)) == 1
    path.write_bytes(content)
    assert whole(load(saved, "a", "b"))


def test_state_and_older_weights_may_stay_behind(saved: Path) -> None:
    assert whole(load(saved, "a", "b"))
    with pytest.raises(CheckpointError, match="holds weights that this model lacks: b"):
        load(saved, "a")


def test_a_system_that_reads_little_at_a_time(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, rng = os.preadv, random.Random(2)
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: real(fd, [into[0][: rng.randint(1, 3000)]], at))
    assert whole(load(saved, "a", "b"))


def test_a_read_error_names_the_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fd: int, into: Any, at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors: cannot be read \(Input/output error\)"):
        load(saved, "a", "b")


def test_what_is_no_file_is_named_and_nobody_waits_for_it(saved: Path) -> None:
    path = saved / "rank_00000.safetensors"
    for make in (os.mkfifo, os.mkdir):
        path.rmdir() if path.is_dir() else path.unlink()
        make(path)
        with pytest.raises(CheckpointError, match=f"{path.name}: not a plain file"):
            load(saved, "a", "b")
        assert "not a plain file" in verify_checkpoint(saved)[0]


def test_a_read_only_directory_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("open", "link", "unlink"):
        monkeypatch.setattr(os, name, refuses)
    monkeypatch.setattr(Path, "unlink", refuses)
    with pytest.raises(CheckpointError, match=r"cannot write there \(Read-only file system\)"):
        RunLock(tmp_path).acquire()


def test_all_is_on_the_disk_before_it_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crash of the machine forgets is what nobody synced."""
    events: list[str] = []

    def noted(call: Callable[..., Any], word: str, place: Callable[..., str]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            where = place(*args)
            result = call(*args)
            events.append(f"{word} {where}")
            return result

        return wrapped

    def name_of(fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).name.split(".tmp-")[0]

    monkeypatch.setattr(storage.os, "fsync", noted(os.fsync, "sync", name_of))
    monkeypatch.setattr(storage.os, "rename", noted(os.rename, "rename", lambda source, target: Path(target).name))
    run = tmp_path / "run"
    saver(run).save(1, [shard("a")], {}, {"tokenizer.json": b"{}"})
    renamed = events.index("rename iter_0000001")
    before = {"rank_00000.safetensors", "tokenizer.json", "manifest.json", "COMMITTED", "iter_0000001"}
    assert before <= {event.removeprefix("sync ") for event in events[:renamed]}
    assert "sync run" in events[renamed:]


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        storage.write_file(tmp_path / "x", b"yours")
    assert (tmp_path / "x").read_bytes() == b"mine"
