"""Ranks and hosts whose loss breaks no connection (shared memory, NCCL, a pulled link) are named in seconds."""

from __future__ import annotations

import os
import signal
import socket
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megalite.comm.world import World
from megalite.config import Config, parse
from megalite.faults import fault_point
from megalite.launch import pulse, watch
from megalite.launch.launcher import LaunchEnvironment, launch
from megalite.testing import run_single

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 1 "
    "--lr 1e-3 --mock-data --vocab-size 64 --distributed-timeout-minutes 5"
).split()
SIZE, SOON = 3, 20.0


def main_waits(config: Config, world: World) -> None:
    """No rank talks to another one, so no connection can show that one is lost."""
    world.report_phase("iteration 1")
    fault_point("test.step", rank=world.rank)
    time.sleep(120)


def body(world: World, per_host: int, stopped: int | None = None) -> tuple[list[int], float]:
    """Forks ranks as an outer launcher would, `per_host` to a host; their statuses and how long all took but one that
    is stopped, which is ended then."""
    watch.GRACE_SECONDS, watch.ROLL_CALL_SECONDS, watch.LISTEN_SECONDS = 0.5, 0.5, 0.1
    pulse.BEAT_SECONDS, pulse.SILENCE_SECONDS = 0.2, 2.0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids, began = [], time.monotonic()
    for rank in range(SIZE):
        pids.append(os.fork())
        if pids[-1] == 0:
            place = LaunchEnvironment("hand", rank, SIZE, rank % per_host, per_host, "127.0.0.1", port)
            os._exit(launch(parse(FLAGS), main_waits, place))
    left = dict.fromkeys(pids, 0)
    deadline = began + SOON
    while any(not left[pid] for rank, pid in enumerate(pids) if rank != stopped) and time.monotonic() < deadline:
        for pid in [pid for pid, status in left.items() if not status]:
            done, status = os.waitpid(pid, os.WNOHANG)
            left[pid] = os.waitstatus_to_exitcode(status) if done else 0
        time.sleep(0.02)
    elapsed = time.monotonic() - began
    for pid in [pid for pid, status in left.items() if not status]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return list(left.values()), elapsed


def test_a_killed_rank_is_named_by_its_neighbour(capfd: pytest.CaptureFixture[str]) -> None:
    """What `kill -9` leaves behind is seen at once by the rank that watches its process, zombie or not."""
    statuses, elapsed = run_single(body, SIZE, faults=["kill@test.step:rank=1"])
    output = capfd.readouterr().out
    assert statuses == [1, -9, 1] and elapsed < SOON, output
    account = f"error: rank 1 (host {socket.gethostname()}) did not answer any more; rank 0 "
    assert output.count("did not answer any more") == 1 and account in output, output


def test_a_silent_host_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """A host that stands still, as behind a pulled link, keeps all its connections."""
    statuses, elapsed = run_single(body, 1, 1, faults=["stop@test.step:rank=1"])
    output = capfd.readouterr().out
    assert [statuses[0], statuses[2]] == [1, 1] and elapsed < SOON, output
    host = socket.gethostname()
    told = "error: rank 1 (host {0}) did not answer any more; rank {1} (host {0}) waited in phase 'iter"
    lines = [told.format(host, rank) for rank in (0, 2)]
    assert any(line in output for line in lines), output  # whoever sees it first tells


def test_a_host_that_is_cut_off_ends_by_itself(capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 serves the store: where that stands still, the others hear nothing of anybody."""
    statuses, _ = run_single(body, 1, 0, faults=["stop@test.step:rank=0"])
    output = capfd.readouterr().out
    assert statuses[1:] == [1, 1] and output.count("is this host cut off?") == 2, output


def test_who_was_stopped_himself_judges_nobody_by_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: now[0]))
    patience = pulse.Patience()
    for _ in range(10):
        now[0] += 1.0
        assert not patience.is_over()
    now[0] += 3600.0  # suspended with the whole job
    assert not patience.is_over()
    patience.heard()
    for second in range(20):
        now[0] += 1.0
        assert patience.is_over() == (second >= 15)


def test_two_launchers_on_one_machine_have_rings_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in trials of several hosts on one: the ranks of the other one are not neighbours."""
    store, parent = dist.HashStore(), [1]
    monkeypatch.setattr(os, "getppid", lambda: parent[0])
    ranks = []
    for rank in (2, 0, 3, 1):
        parent[0] = rank // 2
        ranks.append(pulse.Pulse(store, LaunchEnvironment("torchrun", rank, 4, rank % 2, 2), "a"))
    assert [rank.lost() for rank in ranks] == [""] * 4
