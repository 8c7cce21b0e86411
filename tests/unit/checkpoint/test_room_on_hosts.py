"""Room for saves on the hosts themselves is asked for at the start: two saves, of what this host's ranks keep."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.checkpoint import LocalSaves, LocalSettings, local
from megalite.comm.mesh import Axis
from megalite.errors import CheckpointError


def saves_of(folder: Path, **settings: bool) -> LocalSaves:
    saves = LocalSaves(LocalSettings(folder, **settings), Axis.single("world"), "a")
    saves.token = "token"
    return saves


def fits(saves: LocalSaves, nbytes: int, free: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    try:
        saves.check_room(nbytes)
    except CheckpointError as error:
        assert f"two saves need {2 * nbytes}" in str(error) or nbytes != 100, error
        return False
    return True


def test_what_the_run_has_there_already_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its saves make way for new ones, and so does a part that was staged when the run ended; another run's do not."""
    saves = saves_of(tmp_path)
    assert fits(saves, 100, 200, monkeypatch) and not fits(saves, 100, 199, monkeypatch)
    for name in ("token/iter_0000010", "token/iter_0000020.tmp-0123", "another/iter_0000010"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "rank_00000.safetensors").write_bytes(bytes(40))
    assert fits(saves, 100, 120, monkeypatch) and not fits(saves, 100, 119, monkeypatch)


def test_copies_and_the_ranks_of_the_host_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of twelve ranks, each file on two hosts: two saves of a quarter, twice."""
    saves = saves_of(tmp_path)
    monkeypatch.setattr(local, "together", lambda world, call: call())
    saves._copies, saves.mine = 2, [0, 1, 2]
    saves._world = SimpleNamespace(size=12, rank=0)  # type: ignore[assignment]
    assert fits(saves, 1200, 1200, monkeypatch) and not fits(saves, 1200, 1199, monkeypatch)


def test_memory_is_memory_and_what_is_only_kept_asks_for_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ["ext4"]
    monkeypatch.setattr(local, "file_system", lambda folder: kind[0])
    saves = saves_of(tmp_path, in_memory=True)
    with pytest.raises(CheckpointError, match="--non-persistent-ckpt-type=in_memory: .* is on ext4, not in memory"):
        saves.check_room(100)
    kind[0] = "tmpfs"
    for memory, enough in ((200, True), (199, False)):
        monkeypatch.setattr(local, "free_memory", lambda memory=memory: memory)
        assert fits(saves, 100, 10**9, monkeypatch) == enough
    assert fits(saves_of(tmp_path, kept=True), 100, 0, monkeypatch)


def test_a_save_that_is_deleted_is_none_before_its_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves, path = saves_of(tmp_path), tmp_path / "token" / "iter_0000010"
    path.mkdir(parents=True)
    (path / "COMMITTED").touch()
    there: list[bool] = []
    monkeypatch.setattr("shutil.rmtree", lambda folder, **more: there.append((folder / "COMMITTED").exists()))
    saves.drop_after(5)
    assert there == [False]
