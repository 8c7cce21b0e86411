"""`--nprocs`: whatever happens to a rank, all end soon, the exit status is right and the right rank is named."""

from __future__ import annotations

import errno
import itertools
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalite.comm.world import World
from megalite.config import Config, parse
from megalite.faults import fault_point
from megalite.launch.launcher import LaunchEnvironment, launch
from megalite.testing import RanksFailed, run_single

TIMEOUT_SECONDS = 2.0
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 1 "
    f"--lr 1e-3 --mock-data --vocab-size 64 --distributed-timeout-minutes {TIMEOUT_SECONDS / 60} --nprocs 3"
).split()


def main_three_steps(config: Config, world: World) -> None:
    for step in range(3):
        world.report_phase(f"iteration {step}")
        fault_point("test.step", rank=world.rank, step=step)
        dist.all_reduce(torch.ones(1))


def main_waits_for_a_signal(config: Config, world: World) -> int:
    received: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(signum, lambda number, _frame: received.append(number))
    Path(os.environ["MEGALITE_TEST_FOLDER"], f"ready{world.rank}").write_text(str(os.getpid()))
    while not received:
        time.sleep(0.01)
    Path(os.environ["MEGALITE_TEST_FOLDER"], f"got{world.rank}").write_text(signal.Signals(received[0]).name)
    return 0


def body_launch(world: World, main_name: str, saves: bool = True) -> tuple[int, float]:
    config = parse(FLAGS)
    start = time.monotonic()
    status = launch(config, globals()[main_name], LaunchEnvironment(), saves=saves)
    return status, time.monotonic() - start


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("action", "account"),
    [
        ("kill", "error: rank 1 was killed by SIGKILL (signal 9) in phase 'iteration 1'"),
        ("raise", "error: rank 1 failed in phase 'iteration 1': ValueError: injected fault"),
        ("stop", "error: rank 1 stopped answering in phase 'iteration 1'"),
        ("hold-gil", "error: rank 1 stopped answering in phase 'iteration 1'"),
        ("sleep", "error: rank 1 did not finish in phase 'iteration 1'"),
    ],
)
def test_the_rank_that_failed_is_named(action: str, account: str, capfd: pytest.CaptureFixture[str]) -> None:
    fault = f"{action}@test.step:rank=1:step=1"
    status, elapsed = run_single(body_launch, "main_three_steps", faults=[fault], env={"OMP_NUM_THREADS": None})
    output = capfd.readouterr().out
    assert status == 1
    assert re.search(f"^{re.escape(account)}", output, re.MULTILINE), output
    assert elapsed < TIMEOUT_SECONDS + 10  # On a quiet machine 0.1 s after an end, 4 s after a stop.


def test_the_original_traceback_comes_first(capfd: pytest.CaptureFixture[str]) -> None:
    run_single(body_launch, "main_three_steps", faults=["raise@test.step:rank=2:step=0"])
    lines = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("---")]
    assert lines[0] == "Traceback (most recent call last):"
    assert "ValueError: injected fault" in lines
    assert sum(line.startswith("Traceback") for line in lines) == 1
    assert sum(line.startswith("error: ") for line in lines) == 1


def body_signals_launcher(world: World, number: int) -> int:
    """Forks a process that sends a signal to this one as soon as its ranks are ready."""
    folder, launcher = Path(os.environ["MEGALITE_TEST_FOLDER"]), os.getpid()
    if os.fork() == 0:
        deadline = time.monotonic() + 30
        while len(list(folder.glob("ready*"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(launcher, number)
        os._exit(0)
    return launch(parse(FLAGS), main_waits_for_a_signal, LaunchEnvironment())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_signals_to_the_launcher_reach_every_rank(name: str, tmp_path: Path) -> None:
    number = int(getattr(signal, name))
    assert run_single(body_signals_launcher, number, env={"MEGALITE_TEST_FOLDER": str(tmp_path)}) == 0
    assert [(tmp_path / f"got{rank}").read_text() for rank in range(3)] == [name] * 3


def main_sleeps(config: Config, world: World) -> None:
    time.sleep(60)


def body_forks(world: World, trouble: str) -> int:
    """The launcher, to which something happens when it has made one rank of three."""
    fork, made = os.fork, itertools.count()

    def fork_with_trouble() -> int:
        if next(made) == 1:
            if trouble == "limit":
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            os.kill(os.getpid(), signal.SIGTERM)
        return fork()

    with patch.object(os, "fork", fork_with_trouble):
        status = launch(parse(FLAGS), main_sleeps, LaunchEnvironment())
    assert not Path(f"/proc/self/task/{os.getpid()}/children").read_text(), "a rank is left"
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []), "signals are still blocked"
    return status


def test_a_system_without_room_for_a_rank_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert run_single(body_forks, "limit") == 2
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("error")]
    assert line == (
        "error: --nprocs=3: rank 1 could not be started (Resource temporarily unavailable); start fewer ranks, or "
        "raise the limits of processes and memory (ulimit -u, ulimit -v)"
    )
    assert time.monotonic() - start < 30, "the first rank was waited for"


def test_a_signal_between_two_forks_reaches_all_ranks() -> None:
    start = time.monotonic()
    assert run_single(body_forks, "signal") == 143
    assert time.monotonic() - start < 30, "a rank has not heard it"


def main_is_interrupted(config: Config, world: World) -> None:
    world.report_phase("iteration 7")
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def body_launch_alone(world: World, saves: bool) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored
    return launch(parse(FLAGS[:-2]), main_is_interrupted, LaunchEnvironment(), saves=saves)


@pytest.mark.parametrize(
    ("body", "saves", "lost"),
    [
        ("alone", True, "what was done after the newest checkpoint is not saved"),
        ("alone", False, "nothing was saved (no --save)"),
        ("three ranks", False, "nothing was saved (no --save)"),
    ],
)
def test_an_interrupt_is_one_line_and_a_status(
    body: str, saves: bool, lost: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if body == "alone":
        assert run_single(body_launch_alone, saves) == 130
    else:
        assert run_single(body_launch, "main_is_interrupted", saves)[0] == 130
    lines = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("---")]
    assert lines == [f"error: interrupted by SIGINT in phase 'iteration 7'; {lost}"]


def main_hears_nothing(config: Config, world: World) -> None:
    """As in a collective that waits for a rank that is gone: Python's handlers do not run there."""
    world.report_phase("iteration 7")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    places = [Path(tempfile.gettempdir(), f"deaf_{os.getppid()}_{rank}") for rank in range(world.size)]
    places[world.rank].touch()
    while world.rank == 1 and not all(place.exists() for place in places):
        time.sleep(0.02)
    for _ in range(3 if world.rank == 1 else 0):
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.3)  # the third is no longer the first Ctrl-C
    time.sleep(60)


def test_a_second_interrupt_ends_ranks_that_do_not_hear(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert run_single(body_launch, "main_hears_nothing", env={"TMPDIR": str(tmp_path)})[0] == 130
    assert time.monotonic() - start < 30
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and lines[0].startswith("error: interrupted by SIGINT in phase 'iteration 7'; "), lines


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_single(
            body_signals_launcher,
            int(signal.SIGKILL),
            env={"MEGALITE_TEST_FOLDER": str(tmp_path), "TMPDIR": str(tmp_path)},
        )
    pids = [int((tmp_path / f"ready{rank}").read_text()) for rank in range(3)]
    deadline = time.monotonic() + 5
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
