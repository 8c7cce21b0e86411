"""What a store promises, in memory: conditions, listings, commits, leases. (S3: tests/faults/test_store_faults.py.)"""

from __future__ import annotations

import random
import re
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.checkpoint import Checkpointer, CheckpointReader, committed, resolve_checkpoint, verify_checkpoint
from megalite.checkpoint.background import PendingSave, sweep_staging
from megalite.checkpoint.lease import RunLease
from megalite.checkpoint.remote import attempt_place, read_proven, remove_url, save_id_of, sweep
from megalite.checkpoint.run_dir import set_aside_newer
from megalite.comm.mesh import Axis
from megalite.comm.rectangles import TensorShard
from megalite.errors import CheckpointError
from megalite.stores import StoreUrl, place
from megalite.stores import store as store_module
from megalite.stores.ahead import merged
from megalite.stores.s3 import S3Store
from megalite.stores.store import Again, Store, StoreError, Tagged

pytest.importorskip("fsspec", reason="stores are not tested: fsspec is not installed")


@pytest.fixture
def url() -> StoreUrl:
    where = place(f"memory://{uuid.uuid4().hex}/runs/a")
    assert isinstance(where, StoreUrl)
    return where


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr("megalite.checkpoint.background.AGAIN_SECONDS", 0.01)


def weights(value: float) -> list[TensorShard]:
    return [TensorShard("w", (40, 64), (0, 0), torch.full((40, 64), value))]


def save(url: StoreUrl, staging: Path, *steps: int, **options: Any) -> None:
    saver = Checkpointer(url, world=Axis.single("world"), staging=staging, block_bytes=4096, **options)
    for step in steps:
        saver.save(step, weights(step), {"step": step}, {"x.txt": b"x"})
    saver.wait()


def test_conditions_and_ranges(url: StoreUrl) -> None:
    store, name = url.store, url.key
    assert store.create(name, b"one") and store.create(name, b"one") and not store.create(name, b"two")
    data, etag = store.read_tagged(name)
    newer = store.swap(name, b"three", etag)
    assert data == b"one" and newer is not None and store.swap(name, b"four", etag) is None
    assert store.swap(name, b"three", etag) == newer, "an answer that was lost: the content is ours"
    assert (store.read(name, 1, 3), store.read(name, 2), store.size(name)) == (b"hr", b"ree", 5)
    store.put("other/a/b", b"")
    assert store.names("other") == ["a/"] and store.names("other/a") == ["b"] and store.names("none") == []
    store.delete(name)
    store.delete(name)
    assert not url.is_file() and store.is_safe_for_two(f"{name}.probe")
    pieces = [(0, 4), (4, 6), (9, 10)]
    assert merged(pieces) == merged(pieces, gap=3, most=8) == [pieces[:2], pieces[2:]]
    assert merged(pieces, gap=3) == [pieces]


def test_s3_is_asked_for_the_bytes_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def call(self: S3Store, method: str, **arguments: Any) -> dict[str, Any]:
        asked.append(arguments.get("Range"))
        return {"Body": b"", "ContentLength": 0, "ETag": ""}

    monkeypatch.setattr(S3Store, "_call", call)
    store = S3Store.__new__(S3Store)
    for start, stop in ((0, None), (1, 3), (2, None)):
        store._read("a", start, stop)
    assert asked == [None, "bytes=1-2", "bytes=2-"]


class Failing(Store):
    """Fails `left` times, then answers."""

    left = 3

    def _read(self, name: str, start: int, stop: int | None) -> Tagged:
        self.left -= 1
        if self.left >= 0:
            raise Again("503")
        return Tagged(b"x", "1")


def test_retries_are_counted_and_end() -> None:
    store = Failing("memory", "b")
    assert store.read("k") == b"x" and store.retries == 3
    store.left, store.deadline = 10**6, 0.05
    with pytest.raises(StoreError, match=r"could not read k in \d+ attempts: 503"):
        store.read("k")


def test_an_outage_is_told_and_a_passing_fault_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Failing("memory", "b")
    store.deadline = 100.0
    monkeypatch.setattr(store_module, "FIRST_PAUSE", 0.001)
    store.read("k")
    assert not caplog.records
    store.left = 5
    monkeypatch.setattr(store_module, "PASSING_SECONDS", 0.0)
    store.read("k")
    (line,) = [record.getMessage() for record in caplog.records]  # of several attempts
    assert re.fullmatch(r"memory://b: could not read k \(503\); it is asked for (99|100) s more", line)


def test_saved_swept_aside_and_deleted(url: StoreUrl, tmp_path: Path) -> None:
    save(url, tmp_path, 10, 20, 30, keep_last=2)
    assert [path.name for path in committed(url)] == ["iter_0000020", "iter_0000030"]
    assert float(CheckpointReader(resolve_checkpoint(str(url))).read("w")[0, 0]) == 30
    (url / "iter_0000040.0123456789ab" / "rank_00000.safetensors").write_bytes(b"torn")
    (aside,) = set_aside_newer(url, 20)
    assert resolve_checkpoint(str(url)).name == "iter_0000020" and aside.name.startswith("iter_0000030.aside-")
    sweep(url)
    names = {path.name for path in url.iterdir() if not path.is_file() and path.iterdir()}
    assert "iter_0000040.0123456789ab" not in names and len(names) == 4
    assert verify_checkpoint(aside) == [] and verify_checkpoint(url / "iter_0000020") == []
    assert list(tmp_path.iterdir()) == []


def test_a_listing_that_is_behind(url: StoreUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(url, tmp_path, 10)
    old = url.store.names(url.key)
    save(url, tmp_path, 20)
    with monkeypatch.context() as patch:
        patch.setattr(type(url.store), "names", lambda self, prefix: old)
        assert [path.name for path in url.iterdir() if "." not in path.name] == ["iter_0000010"]
        assert resolve_checkpoint(str(url)).name == "iter_0000020", "the tracker names it, and it is there"
    sweep(url)
    assert verify_checkpoint(url / "iter_0000020") == []


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.full)])
def test_flipped_bits_are_refused(url: StoreUrl, tmp_path: Path, count: int) -> None:
    save(url, tmp_path, 10)
    path = url / "iter_0000010"
    attempt = attempt_place(path, str(save_id_of(path)))
    files = [path / "COMMITTED", *sorted(attempt.iterdir())]
    rng = random.Random(5)
    for _ in range(count):
        file = rng.choice(files)
        whole = file.read_bytes()
        # the end of COMMITTED says which run wrote it, for people
        at = rng.randrange(whole.index(b" run ") if file.name == "COMMITTED" else len(whole))
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        assert verify_checkpoint(path), f"{file} at {at}"
        file.write_bytes(whole)
    assert verify_checkpoint(path) == []


def test_a_name_that_is_damaged_on_the_way_is_asked_for_again(
    url: StoreUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit of COMMITTED can make it name a save that there is not."""
    save(url, tmp_path, 1)
    path = url / "iter_0000001"
    right, whose, damaged = url.store.read, str(save_id_of(path)), [False, True]

    def read(name: str, *part: Any) -> bytes:
        data = right(name, *part)
        if not name.endswith("COMMITTED") or not damaged.pop():
            return data
        return data.replace(whose.encode(), b"g" + whose[1:].encode())

    monkeypatch.setattr(url.store, "read", read)
    assert read_proven(path)[1] == whose
    damaged[:] = [True] * 9
    with pytest.raises(CheckpointError, match=r"manifest.json: missing; the checkpoint is damaged"):
        read_proven(path)


def test_two_writers_make_one_commit(url: StoreUrl, tmp_path: Path) -> None:
    said: list[str] = []

    def write(number: int) -> None:
        try:
            save(url, tmp_path / str(number), 10)
            said.append("")
        except CheckpointError as error:
            said.append(str(error))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(bool, said)) == [False, True, True, True], said
    assert verify_checkpoint(url / "iter_0000010") == []


def test_a_report_that_is_damaged_on_the_way_is_asked_for_again(
    url: StoreUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what has arrived reads as a report: a manifest would be made of it."""
    job: Any = SimpleNamespace(final=url / "iter_0000001", save_id="0" * 12, rank=1, step=1, staging=tmp_path)
    upload, right, damaged = PendingSave(job, lambda: None), url.store.read, [False, True]
    upload.report = {"tensors": "1"}
    upload.send()
    monkeypatch.setattr(url.store, "read", lambda *a: right(*a).replace(b'"1"', b'"3"' if damaged.pop() else b'"1"'))
    assert upload._reported("report_00001.json") == upload.report
    damaged[:] = [True] * 9
    with pytest.raises(CheckpointError, match=r"report_00001.json: damaged"):
        upload._reported("report_00001.json")


def test_a_lease_is_held_by_one_and_taken_over(url: StoreUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLease, "heartbeat", 0.02)
    monkeypatch.setattr(RunLease, "stale_after", 0.5)
    first = RunLease(url).acquire()
    with pytest.raises(CheckpointError, match="in use by another run"):
        RunLease(url).acquire()
    time.sleep(0.1)
    assert first.held
    monkeypatch.setattr("megalite.checkpoint.lease.process_lives", lambda holder: None)  # as on another host
    with pytest.raises(CheckpointError, match="in use by another run"):
        RunLease(url).acquire()
    first._stop.set()  # it stands still from now on
    second = RunLease(url).acquire()
    assert second.held and not first.held
    with pytest.raises(CheckpointError, match="another run has taken it over; this one saves no more"):
        save(url, tmp_path, 10, lock=first)
    assert committed(url) == []
    second.release()
    assert not second.path.is_file()


def test_a_bit_that_flips_on_the_way_takes_no_lease(url: StoreUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not where an answer was lost and what was written is read back."""
    lease, right, damaged = RunLease(url).acquire(), url.store.read_tagged, [True]

    def read(name: str) -> Tagged:
        data, etag = right(name)
        return Tagged(data.replace(b'"token": "', b'"token": "x') if damaged and damaged.pop() else data, etag)

    monkeypatch.setattr(url.store, "read_tagged", read)
    assert lease.held
    damaged[:] = [True]
    assert url.store.create(lease.path.key, right(lease.path.key).data)
    damaged[:] = [True] * 9
    assert not lease.held
    damaged.clear()
    lease.release()


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "x.txt", "manifest.json"])
@pytest.mark.parametrize("cut", [False, True])
def test_what_arrives_damaged_is_sent_again(
    url: StoreUrl,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    cut: bool,
) -> None:
    right, damaged = url.store.put, [True, True]

    def put(key: str, content: Path | bytes) -> None:
        if key.endswith(name) and damaged:
            damaged.pop()
            data = content if isinstance(content, bytes) else content.read_bytes()
            content = data[:-1] if cut else data[:-1] + bytes([data[-1] ^ 4])
        right(key, content)

    monkeypatch.setattr(url.store, "put", put)
    save(url, tmp_path, 10)
    assert verify_checkpoint(url / "iter_0000010") == [] and not damaged
    assert (
        caplog.text.count(f"{name}: " + ("has " if cut else "has other bytes than were sent; the upload is rep")) == 2
    )
    damaged[:] = [True] * 9
    with pytest.raises(CheckpointError, match=f"{name}: has .*, 3 uploads in a row"):
        save(url, tmp_path, 20)


def test_room_for_two_saves_on_their_way_is_asked_for_at_the_start(
    url: StoreUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all ranks of the host: each has its own part there, and the next save is staged while one is sent."""
    saver = Checkpointer(url, world=Axis.single("world"), staging=tmp_path)
    size, asked = saver._agree_on_plan(weights(1)).nbytes, list[int]()
    for ranks, free, fits in (
        (1, 2 * size, True),
        (1, 2 * size - 1, False),
        (3, 6 * size, True),
        (3, 6 * size - 1, False),
    ):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        saver.local = SimpleNamespace(mine=[0] * ranks, check_room=asked.append)  # type: ignore[assignment]
        if fits:
            saver.check_room(weights(1))
            continue
        with pytest.raises(
            CheckpointError, match=f"--checkpoint-staging-path={tmp_path}: 2 saves of this host's ranks"
        ):
            saver.check_room(weights(1))
    assert asked == [size] * 4, "what is kept on the hosts needs room, too"


def test_what_an_interrupted_run_has_staged_gives_its_room_back(tmp_path: Path) -> None:
    """Nothing else in the folder does: it is the run's own, with its metrics."""
    for name in ("iter_0000005.tmp-x-0", "iter_0000010.tmp-y-1", "data_cache"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    sweep_staging(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["data_cache"]


def test_a_checkpoint_that_is_deleted_is_none_before_its_files_go(
    url: StoreUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(url, tmp_path, 10)
    there: list[bool] = []
    monkeypatch.setattr(
        url.store, "delete_folder", lambda name: there.append((url / "iter_0000010/COMMITTED").is_file())
    )
    remove_url(url / "iter_0000010")
    assert there == [False]


def test_a_checkpoint_that_is_set_aside_is_nowhere_lost(
    url: StoreUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new name is there before the old one goes."""
    save(url, tmp_path, 10, 20)
    monkeypatch.setattr(url.store, "delete", lambda name: (_ for _ in ()).throw(StoreError("killed here")))
    with pytest.raises(StoreError):
        set_aside_newer(url, 10)
    (aside,) = [path for path in url.iterdir() if ".aside-" in path.name]
    assert verify_checkpoint(aside) == [] and verify_checkpoint(url / "iter_0000020") == []


def test_no_checkpoint_is_committed_before_every_rank_has_reported(url: StoreUrl, tmp_path: Path) -> None:
    committed_of: list[Any] = []
    job: Any = SimpleNamespace(final=url / "iter_0000001", save_id="0" * 12, rank=0, step=1, staging=tmp_path)
    job.commit = committed_of.append
    first = PendingSave(job, lambda: None)
    first.report = {"rank": 0}
    assert not first.commit(3)
    for rank in (2, 1):
        assert not first.commit(3) and committed_of == []
        other = PendingSave(SimpleNamespace(**{**job.__dict__, "rank": rank}), lambda: None)  # type: ignore[arg-type]
        other.report = {"rank": rank, "file": f"{rank}.safetensors"}
        (tmp_path / f"{rank}.safetensors").write_bytes(b"part")
        other.send()
        assert (tmp_path / f"{rank}.safetensors").exists(), "not committed yet: it may have to be kept"
    assert first.commit(3)
    assert committed_of == [[{"rank": 0}, *({"rank": rank, "file": f"{rank}.safetensors"} for rank in (1, 2))]]
    parts = ["1.safetensors", "2.safetensors"]
    assert [path.name for path in first.attempt.iterdir()] == parts, "reports are for the commit alone"


def test_failed_uploads_are_kept_tried_again_and_end_the_run(
    url: StoreUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, original = threading.Event(), type(url.store)._put_file

    def put(self: Store, name: str, file: Path) -> None:
        if broken.is_set():
            raise StoreError("no such luck")
        original(self, name, file)

    monkeypatch.setattr(type(url.store), "_put_file", put)
    saver = Checkpointer(url, world=Axis.single("world"), staging=tmp_path)
    assert saver.pending is not None
    broken.set()
    for step in (1, 2):
        saver.save(step, weights(step), {})
        while not all(upload.failed for upload in saver.pending._waiting):
            time.sleep(0.01)
        assert saver.failure is None and len(list(tmp_path.glob("*/*.safetensors"))) == step
    broken.clear()
    saver.wait()
    assert [path.name for path in committed(url)] == ["iter_0000001", "iter_0000002"]
    broken.set()
    for step in (3, 4, 5):
        saver.save(step, weights(step), {})
    while saver.failure is None:
        time.sleep(0.01)
    assert "3 saves could not be uploaded and are kept in" in saver.failure and "no such luck" in saver.failure
    with pytest.raises(CheckpointError, match="no such luck"):
        saver.wait()
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 3
