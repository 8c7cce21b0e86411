"""A rank without a place waits until the run is done, has failed, or its launcher has gone; the run waits for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from megalite.comm import World
from megalite.launch import spares
from megalite.launch.environment import LaunchEnvironment
from megalite.launch.watch import OVER
from megalite.testing import run_single

PLACE = LaunchEnvironment("torchrun", 2, 3, 0, 1)


def waits(store: Any, *, after: str) -> tuple[int, int]:
    """(Exit status of a spare, how many have said that they leave), where `after` is set while it waits."""
    spares.ASK_SECONDS, spares.open_store = 0.005, lambda *args: store
    timer = threading.Timer(0.05, lambda: store.set(after, ""))
    timer.start()
    status = spares.wait_as_spare(PLACE, "a", 10.0)
    timer.join()
    return status, store.add(spares.LEFT, 0)


def body_waits(world: World) -> list[tuple[int, int]]:
    return [waits(dist.HashStore(), after=spares.DONE), waits(dist.HashStore(), after=OVER)]


def test_a_spare_ends_with_the_run_and_tells_what_became_of_it() -> None:
    assert run_single(body_waits) == [(0, 1), (1, 0)]


def orphan(started_by: int, open_store: Any) -> int:
    """Exit status of a spare whose launcher goes after a moment (0), or had gone before."""
    pid = os.fork()
    if pid == 0:
        spares.ASK_SECONDS, spares.open_store = 0.005, lambda *args: open_store(30)
        real, calls = os.getppid, iter(range(10**6))
        os.getppid = lambda: real() + (started_by == 0 and next(calls) > 3)
        os._exit(9 + spares.wait_as_spare(replace(PLACE, started_by=started_by), "a", 10.0))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def body_orphans(world: World) -> list[int]:
    """Of spares that wait, and of those that look for a store which nobody serves."""
    return [orphan(0, lambda seconds: dist.HashStore()), orphan(0, time.sleep), orphan(1, time.sleep)]


def test_a_spare_ends_with_its_launcher_wherever_it_is() -> None:
    began = time.monotonic()
    assert run_single(body_orphans) == [1, 1, 1] and time.monotonic() - began < 25


class Gone(dist.HashStore):
    """Rank 0, which served it, is lost."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("connection reset by peer")


def body_gone(world: World) -> int:
    spares.open_store = lambda *args: Gone()  # type: ignore[assignment]
    return spares.wait_as_spare(PLACE, "a", 10.0)


def test_a_spare_whose_store_is_gone_has_failed_too() -> None:
    """Not done: its launcher starts it again with the others."""
    assert run_single(body_gone) == 1


class Telling(dist.HashStore):
    """Says through a pipe that it is asked."""

    pipe: int

    def check(self, keys: list[str]) -> bool:
        os.write(self.pipe, b".")
        return super().check(keys)


def body_signals(world: World) -> list[int]:
    """Exit statuses of spares that get a signal which asks ranks to save, then one that ends them."""
    statuses = []
    for last in (signal.SIGTERM, signal.SIGHUP):
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            store = Telling()
            store.pipe = told
            spares.open_store = lambda *args, store=store: store  # type: ignore[assignment, misc]
            os._exit(9 + spares.wait_as_spare(PLACE, "a", 10.0))
        os.read(ready, 1)
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.05)
        os.kill(pid, last)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return statuses


def test_a_spare_saves_nothing_and_ends_at_once() -> None:
    assert run_single(body_signals) == [0, 0]


@pytest.mark.parametrize(("leave", "least", "most"), [(2, 0.05, 5.0), (1, 0.3, 5.0)])
def test_the_run_stays_until_its_spares_have_heard(
    leave: int, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or rank 0 takes the store away with it; but for a spare that is lost only so long."""
    monkeypatch.setattr(spares, "FAREWELL_SECONDS", 10.0 if leave == 2 else 0.3)
    store = dist.HashStore()

    def depart() -> None:
        store.wait([spares.DONE])
        time.sleep(0.05)
        for _ in range(leave):
            store.add(spares.LEFT, 1)

    thread, began = threading.Thread(target=depart), time.monotonic()
    thread.start()
    spares.release_spares(store, 2)
    assert least <= time.monotonic() - began < most
    thread.join()
