"""A store that answers nothing any more: a run that is to end does so soon, and keeps on its hosts what it could not
send; the same command continues from it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from store_server import FaultProxy, make_bucket, moto_server
from torchrun_agents import TINY, environment

from megalite.checkpoint import Checkpointer, CheckpointReader, LocalSaves, LocalSettings, resolve_checkpoint
from megalite.comm import Axis, ParallelMesh, World
from megalite.config import parse
from megalite.errors import CheckpointError
from megalite.observe import METRICS_FILE
from megalite.stores import store as store_module
from megalite.testing import run_ranks, run_single
from megalite.train.run_directory import RunDirectory

sys.path.append(str(Path(__file__).parents[1] / "unit" / "checkpoint"))
from checkpoint_layouts import holds, make_model  # noqa: E402
from test_store_faults import hurry, shards_of  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
WORLD = 3


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with moto_server() as port:
        served = FaultProxy(port)
        make_bucket(port, "dead")
        yield served
        served.shutdown()


def saver_of(world: World, staging: str) -> Checkpointer:
    hurry()
    axis = ParallelMesh.build(rank=world.rank, size=world.size).world
    local = LocalSaves(LocalSettings(Path(staging), kept=True, block_bytes=4096), axis, f"host{world.rank}")
    local.token = "token"
    return Checkpointer("s3://dead/runs/a", world=axis, staging=Path(staging), block_bytes=4096, local=local)


def save(world: World, staging: str, dead: bool) -> tuple[str, float]:
    """Saves steps 10 and 20 in a run that is to end; what was wrong, and how long that took."""
    if dead:
        store_module.END_SECONDS, store_module.LAST_SECONDS = 0.5, 0.2
    saver, began = saver_of(world, staging), time.monotonic()
    saver.hasten()
    try:
        for step in (10, 20):
            saver.save(step, shards_of(step, world.rank), {"step": step}, {"a.json": b"{}"})
        saver.wait()
    except CheckpointError as error:
        return error.text, time.monotonic() - began
    return "", 0.0


def load(world: World, staging: str) -> int:
    """Loads what the hosts have kept, and compares it to the bit."""
    saver = saver_of(world, staging)
    assert saver.local is not None
    path = saver.local.newest(10)
    assert path is not None
    mine = shards_of(20, world.rank, fill=False)
    assert saver.load(path, mine) == {"step": 20}
    holds(make_model(20), [mine])
    return int(path.name[5:])


def alike(world: World, *runs: str) -> bool:
    """Whether two runs' newest checkpoints have the same bits."""
    one, other = (CheckpointReader(resolve_checkpoint(run)) for run in runs)
    return one.names == other.names and all(torch.equal(one.read(name), other.read(name)) for name in one.names)


@pytest.mark.parametrize(
    ("fault", "part"), [("silent", ""), pytest.param("503", "rank_00000", marks=pytest.mark.landing)]
)
def test_what_cannot_be_sent_is_kept(tmp_path: Path, proxy: FaultProxy, fault: str, part: str) -> None:
    """Also where some ranks' parts were sent: what is staged stays until all is committed. Only the newest."""
    proxy.plan = lambda method, path: fault if part in path else None
    found = run_ranks(save, WORLD, str(tmp_path), True, env=proxy.environment)
    assert all("iteration 20 is kept in" in text and seconds < 20 for text, seconds in found), found
    proxy.plan = lambda method, path: None
    assert run_ranks(load, WORLD, str(tmp_path), env=proxy.environment) == [20] * WORLD
    assert [path.name for path in tmp_path.iterdir()] == ["token"], "nothing is staged twice"


def begin(world: World, staging: str, *flags: str) -> int:
    """How many saves are staged when a run has begun."""
    saves = ["--save", "s3://dead/runs/a", "--checkpoint-staging-path", staging]
    with RunDirectory(parse([*TINY, "--train-iters", "1", *saves, *flags]), Axis.single("world")):
        return len([*Path(staging).glob("iter*")])


def test_what_was_staged_before_is_removed_at_the_start(tmp_path: Path, proxy: FaultProxy) -> None:
    """Also of a run that has nothing to train; not by one that only evaluates, which does not hold the lease."""
    (tmp_path / "iter_0000010.tmp-0dbd2719644e-1").mkdir()
    evaluates = "--skip-train", "--eval-iters", "1"
    assert run_single(begin, str(tmp_path), *evaluates, env=proxy.environment) == 1
    assert run_single(begin, str(tmp_path), env=proxy.environment) == 0


@pytest.mark.landing
def test_a_store_that_answers_is_not_hurried(tmp_path: Path, proxy: FaultProxy) -> None:
    found = run_ranks(save, WORLD, str(tmp_path), False, env=proxy.environment)
    assert found == [("", 0.0)] * WORLD and not [*tmp_path.glob("iter*")]


@pytest.mark.landing
@pytest.mark.parametrize(
    ("fault", "trained"), [("503", False), ("503", True), pytest.param("silent", False, marks=pytest.mark.full)]
)
def test_a_run_gets_sigterm_while_its_store_is_dead(
    tmp_path: Path, proxy: FaultProxy, fault: str, trained: bool
) -> None:
    """It ends within a minute with one line; the same command then ends as if nothing had been. trained: what it has
    kept is its last iteration."""
    flags = [*TINY, "--nprocs", "2", "--global-batch-size", "4", "--train-iters", "60", "--save-interval", "20"]
    url = f"s3://dead/runs/{fault}-{trained}"  # what a bucket holds outlives its server
    stored = [
        "--save",
        url,
        "--auto-resume",
        "--checkpoint-staging-path",
        str(tmp_path / "staging"),
        "--prometheus-file",
        str(tmp_path / "metrics.prom"),
    ]
    env = environment(**{key: str(value) for key, value in proxy.environment.items()})
    log = tmp_path / "log"

    def start(*more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "pretrain_gpt.py", *flags, *more]
        with log.open("wb") as file:
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)

    run = start(*stored)
    deadline = time.monotonic() + 300
    while f"saved {url}/iter_0000020" not in log.read_text():
        assert time.monotonic() < deadline and run.poll() is None, log.read_text()[-3000:]
        time.sleep(0.05)
    proxy.plan = lambda method, path: fault
    died = time.time()
    while trained and " 60/      60 |" not in log.read_text():
        assert time.monotonic() < deadline and run.poll() is None, log.read_text()[-3000:]
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert run.wait(300) == 2, log.read_text()[-3000:]
    print(f"\n{fault}: ended after {time.monotonic() - began:.0f} s")
    said = log.read_text()
    assert said.count("error: ") == 1 and "is kept in" in said and "Traceback" not in said, said[-3000:]
    numbers = dict(re.findall(r"(megalite_\w+)\{.*\} (\S+)", (tmp_path / "metrics.prom").read_text()))
    assert numbers["megalite_failed"] == "1.0" and float(numbers["megalite_save_timestamp_seconds"]) < died
    assert json.loads((tmp_path / "staging" / METRICS_FILE).read_text().splitlines()[-1])["status"] == "failed"
    proxy.plan = lambda method, path: None
    assert start(*stored).wait(300) == 0, log.read_text()[-3000:]
    assert f"newer than what --save={url} holds (iteration 20)" in log.read_text(), log.read_text()[:3000]
    assert not [*(tmp_path / "staging").rglob("rank_*")]
    assert start("--save", str(tmp_path / "quiet")).wait(300) == 0
    assert run_ranks(alike, 1, url, str(tmp_path / "quiet"), env=proxy.environment) == [True]
