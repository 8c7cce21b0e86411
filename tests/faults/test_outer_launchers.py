"""Ranks that torchrun, srun, mpirun or a hand has started: whatever happens to one, all end soon, and it is named."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.comm.world import World
from megalite.config import Config, parse
from megalite.events import EventHandler
from megalite.faults import fault_point
from megalite.launch import watch
from megalite.launch.launcher import LaunchEnvironment, launch, read_environment
from megalite.launch.rank_page import RankPage
from megalite.testing import run_single

TIMEOUT_SECONDS = 2.0
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 1 "
    f"--lr 1e-3 --mock-data --vocab-size 64 --distributed-timeout-minutes {TIMEOUT_SECONDS / 60}"
).split()
SIZE = 3
HOST = rf"\(host {re.escape(socket.gethostname())}\)"
LOST = rf"rank 1 {HOST} did not answer any more; rank [02] {HOST} waited in phase 'iteration 1'"


def main_three_steps(config: Config, world: World) -> None:
    for step in range(3):
        world.report_phase(f"iteration {step}")
        fault_point("test.step", rank=world.rank, step=step)
        dist.all_reduce(torch.ones(1))


def main_waits(config: Config, world: World) -> None:
    Path(os.environ["MEGALITE_TEST_FOLDER"], f"ready{world.rank}").write_text(str(os.getpid()))
    time.sleep(60)


def start(main_name: str, launcher: str, listen: float = 0.1) -> list[int]:
    """Forks the ranks as an outer launcher would; their process numbers."""
    watch.GRACE_SECONDS, watch.LISTEN_SECONDS = 1.0, listen
    watch.ROLL_CALL_SECONDS = 2.0  # a busy machine keeps a rank waiting, which is not lost for that
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(SIZE):
        pids.append(os.fork())
        if pids[-1] == 0:
            place = LaunchEnvironment(launcher, rank, SIZE, rank, SIZE, "127.0.0.1", port, parent=launcher == "srun")
            with EventHandler(f"tee -a {os.environ.get('MEGALITE_TEST_FOLDER', '/dev')}/null", {}):
                os._exit(launch(parse(FLAGS), globals()[main_name], place))
    return pids


def main_sees_nothing(config: Config, world: World) -> None:
    """Two ranks that no broken connection wakes, as behind shared memory."""
    world.report_phase("iteration 1")
    fault_point("test.step", rank=world.rank, step=1)
    time.sleep(60)


def body_ranks(world: World, main: str = "main_three_steps", listen: float = 0.1) -> tuple[list[int], float]:
    pids, began = start(main, "torchrun", listen), time.monotonic()
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return statuses, time.monotonic() - began


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("action", "status", "account"),
    [
        ("kill", -9, LOST),
        ("raise", 1, r"ValueError: injected fault"),
        ("stop", -9, rf"error: rank 1 {HOST} stopped answering in phase 'iteration 1' \(\d"),
        ("hold-gil", -9, rf"error: rank 1 {HOST} stopped answering in phase 'iteration 1' \(\d"),
        ("sleep", 1, rf"error: rank 1 {HOST} did not finish in phase 'iteration 1' though another rank has ended"),
    ],
)
def test_the_rank_that_failed_is_named(
    action: str, status: int, account: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faults, listen = [f"{action}@test.step:rank=1:step=1"], 60.0 if action == "kill" else 0.1
    env = {"MEGALITE_TEST_FOLDER": str(tmp_path)}
    statuses, elapsed = run_single(body_ranks, "main_three_steps", listen, faults=faults, env=env)
    output = capfd.readouterr().out
    assert statuses == [1, status, 1], output
    assert len(re.findall(account, output)) == 1, output
    assert output.count("did not answer any more") == (action != "raise"), output  # one account, of all ranks together
    assert action != "kill" or output.count("error:") == 1, output
    assert output.count("Traceback") == (action == "raise"), output
    assert elapsed < TIMEOUT_SECONDS + 10
    told = [json.loads(line) for line in (tmp_path / "null").read_text().splitlines()] if action == "kill" else []
    assert [event["event"] for event in told] == ["lost"] * (action == "kill")
    assert all(re.search(account, event["line"]) for event in told)


def body_orphan(world: World) -> str:
    """What a rank says whose launcher goes before the rank has imported torch."""
    (reading, writing), (ready, begun) = os.pipe(), os.pipe()
    if (agent := os.fork()) == 0:
        if os.fork() == 0:
            os.environ.update(
                RANK="1", WORLD_SIZE="2", MASTER_PORT="1", MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID=""
            )
            place, agent = read_environment(), os.getppid()
            os.dup2(writing, 2)
            os.write(begun, b".")
            while os.getppid() == agent:
                time.sleep(0.01)
            os._exit(launch(parse(FLAGS), main_waits, place))
        os.read(ready, 1)
        os._exit(0)
    os.waitpid(agent, 0)
    os.close(writing)
    with open(reading, encoding="utf-8") as said:
        return said.read()


def test_a_rank_whose_launcher_was_gone_early_ends() -> None:
    """It would meet the others and train, beside those that are started in its place."""
    line = r"error: rank 1 \(host [^)]*\) ends.*: its launcher \(torchrun\) is gone"
    assert re.search(line, run_single(body_orphan))


def test_no_stacks_bury_the_cause_where_it_is_known(capfd: pytest.CaptureFixture[str]) -> None:
    """Only a rank that does not come to an end, and whose reason is not told, shows where it is. The neighbour that saw
    the process end names it in the words of a rank whose connection broke (`test_the_rank_that_failed_is_named`, whose
    neighbours look too late)."""
    statuses, _ = run_single(body_ranks, "main_sees_nothing", faults=["kill@test.step:rank=1:step=1"])
    output = capfd.readouterr().out
    assert statuses == [1, -9, 1], output
    assert len(re.findall(LOST, output)) == output.count("did not answer any more") == 1, output
    assert "most recent call first" not in output and output.count("\n") < 8, output


class LateStore(dist.HashStore):
    """The rank begins to leave while its watch thread asks for the word."""

    watch: watch.RankWatch

    def add(self, key: str, value: int) -> int:
        self.watch._leaving.set()
        return super().add(key, value)


def body_tells_of_failed(world: World) -> int:
    """How many ranks have taken the word."""
    store, ranks = dist.HashStore(), []
    for rank in range(2):
        place = LaunchEnvironment("torchrun", rank, 2, rank, 2)
        ranks.append(watch.RankWatch(place, RankPage(), hang_seconds=60, host="here"))
        ranks[rank]._store = store
    ranks[1].leave_word("ValueError: told by itself")
    ranks[0]._tell_lost("rank 1 (host here)")
    return store.add(watch.TOLD, 0)


def test_who_has_told_why_it_failed_is_not_lost_besides(capfd: pytest.CaptureFixture[str]) -> None:
    """Its process ends after its own account: the neighbour that sees that has nothing to add."""
    assert run_single(body_tells_of_failed) == 0 and "any more" not in capfd.readouterr().out


def body_both_tell(world: World) -> int:
    place = LaunchEnvironment("torchrun", 0, 2, 0, 2)
    store = LateStore()
    store.watch = watch.RankWatch(place, RankPage(), hang_seconds=60, host="here")
    store.watch._store = store
    store.watch._tell_lost("rank 1 (host here)")
    blame = store.watch.account("closed by peer")
    return int(blame is not None) + int(store.get("end/told"))


def test_one_of_two_threads_of_a_rank_tells_who_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    """The one that has taken the word, also where the other has begun to leave meanwhile."""
    assert run_single(body_both_tell) == 1
    assert capfd.readouterr().out.count("error: rank 1 (host here) did not answer any more") == 1


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    """Nobody else would end them: they would train on beside the run that takes their place."""
    assert run_single(body_kills_launcher, env={"MEGALITE_TEST_FOLDER": str(tmp_path)}) == []


def body_kills_launcher(world: World) -> list[int]:
    """Returns the ranks that outlive their launcher."""
    folder, launcher = Path(os.environ["MEGALITE_TEST_FOLDER"]), os.fork()
    if launcher == 0:
        start("main_waits", "srun")
        time.sleep(60)
    while len(pids := [path.read_text() for path in folder.glob("ready*")]) < SIZE or not all(pids):
        time.sleep(0.01)
    os.kill(launcher, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (alive := [int(pid) for pid in pids if is_running(int(pid))]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
