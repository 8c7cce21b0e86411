"""A lease is renewed as long as it is ours, outlives a store that is away for a moment, and is never taken by two."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from megalite.checkpoint import lease as lease_module
from megalite.checkpoint.lease import RunLease
from megalite.errors import CheckpointError
from megalite.stores import StoreUrl, place
from megalite.stores.store import StoreError, Tagged

pytest.importorskip("fsspec", reason="stores are not tested: fsspec is not installed")


@pytest.fixture
def url() -> StoreUrl:
    where = place(f"memory://{uuid.uuid4().hex}/runs/a")
    assert isinstance(where, StoreUrl)
    return where


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder is on another host, whose processes are not seen."""
    monkeypatch.setattr(lease_module, "process_lives", lambda holder: None)


def hurried(lock: RunLease, heartbeat: float, stale_after: float = 120.0) -> RunLease:
    lock.heartbeat, lock.stale_after = heartbeat, stale_after
    return lock


def beats(lease: RunLease) -> int:
    return int(json.loads(lease.path.read_bytes())["beats"])


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def failing_swap(url: StoreUrl, monkeypatch: pytest.MonkeyPatch, fails: list[bool]) -> None:
    """Renewals fail while `fails` says so."""
    right = url.store.swap

    def swap(name: str, data: bytes, etag: str) -> str | None:
        if fails[0]:
            raise StoreError("503")
        return right(name, data, etag)

    monkeypatch.setattr(url.store, "swap", swap)


def test_a_store_that_is_away_for_a_moment_costs_no_lease(url: StoreUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor after more time than a lease stands still: what counts is the last renewal."""
    fails = [False]
    failing_swap(url, monkeypatch, fails)
    with hurried(RunLease(url), heartbeat=0.01, stale_after=0.5) as lease:
        time.sleep(0.6)
        fails[0] = True
        time.sleep(0.05)
        fails[0] = False
        begun = beats(lease)
        wait_for(lambda: beats(lease) > begun + 2)
        assert lease.held


def test_who_could_not_renew_for_long_saves_no_more(
    url: StoreUrl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Although nobody has taken it yet: somebody may, at any moment."""
    fails = [False]
    failing_swap(url, monkeypatch, fails)
    lease = hurried(RunLease(url), heartbeat=0.01, stale_after=0.1).acquire()
    fails[0] = True
    wait_for(lambda: "not renewed for" in caplog.text)
    holder = lease._holder()
    assert not lease.held and holder is not None and holder.token == lease.token
    lease.release()


@pytest.mark.usefixtures("elsewhere")
def test_a_former_holder_does_not_take_the_lease_of_the_next_one_away(url: StoreUrl) -> None:
    first = hurried(RunLease(url), heartbeat=0.01).acquire()
    first._stop.set()
    second = hurried(RunLease(url), heartbeat=0.01, stale_after=0.2).acquire()
    first.release()
    assert second.held
    second.release()


@pytest.mark.usefixtures("elsewhere")
def test_of_two_that_take_over_at_once_one_does(url: StoreUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one's swap finds another version than the one that stood still."""
    dead = hurried(RunLease(url), heartbeat=60).acquire()
    late, quick = (hurried(RunLease(url), heartbeat=0.01, stale_after=0.1) for _ in range(2))
    watch = late._changes

    def changes(*found: Any) -> bool:
        monkeypatch.setattr(late, "_changes", watch)
        stands_still = watch(*found)
        quick.acquire()
        return stands_still

    monkeypatch.setattr(late, "_changes", changes)
    with pytest.raises(CheckpointError, match="in use by another run"):
        late.acquire()
    assert quick.held
    quick.release()
    dead.release()


@pytest.mark.usefixtures("elsewhere")
def test_a_store_without_conditions_is_named_and_taken_over_all_the_same(
    url: StoreUrl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dead = hurried(RunLease(url), heartbeat=60).acquire()
    assert "unsafe" not in caplog.text
    monkeypatch.setattr(url.store, "conditional", False)
    monkeypatch.setattr(url.store, "is_safe_for_two", lambda probe: False)
    with hurried(RunLease(url), heartbeat=0.01, stale_after=0.05) as lease:
        assert "this store does not hold conditions of writes: unsafe for two writers" in caplog.text
        assert lease.held and not dead.held
        begun = beats(lease)
        wait_for(lambda: beats(lease) > begun)


def test_a_dry_run_asks_who_holds_the_lease(url: StoreUrl) -> None:
    RunLease(url).check()
    with RunLease(url), pytest.raises(CheckpointError, match="--save=memory://.*: in use by another run"):
        RunLease(url).check()


def test_a_lease_that_names_nobody_legible_is_watched(url: StoreUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    (url / "run.lock").write_bytes(b"torn")
    right, versions = url.store.read_tagged, iter(range(1000))
    monkeypatch.setattr(url.store, "read_tagged", lambda name: Tagged(right(name).data + b"%d" % next(versions), "1"))
    with pytest.raises(CheckpointError, match=r"in use by another run \(unknown\)"):
        hurried(RunLease(url), heartbeat=0.01, stale_after=1.0).acquire()
