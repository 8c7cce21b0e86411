"""`--on-event` from end to end: ranks that are killed, and a store that fails."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from store_server import FaultProxy, make_bucket, moto_server

from megalite.checkpoint import background
from megalite.comm.world import World
from megalite.stores import store as store_module
from megalite.stores.s3 import S3Store
from megalite.testing import run_single
from pretrain_gpt import main

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --train-iters 4 "
    "--global-batch-size 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --device cpu "
    "--eval-iters 0 --log-interval 9 --save-interval 2"
).split()


def run(world: World, argv: list[str]) -> int:
    """A store is given up after half a second, and asked again soon."""
    store_module.FIRST_PAUSE, store_module.LONGEST_PAUSE, background.AGAIN_SECONDS = 0.002, 0.02, 0.2
    with patch.object(S3Store, "deadline", 0.5):
        return main(argv)


def told(path: Path, count: int) -> list[dict]:
    """In the order of their times: each is written by a process of its own."""
    for _ in range(100):
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            break
        time.sleep(0.05)
    return sorted(map(json.loads, lines), key=lambda event: event["time"])


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.landing)])
def test_a_killed_rank_is_told_and_the_restart(rank: int, tmp_path: Path) -> None:
    argv = [*FLAGS, "--nprocs", "2", "--max-restarts", "1", "--auto-resume", "--save", f"{tmp_path}/run"]
    argv += ["--on-event", f"tee -a {tmp_path}/told"]
    assert run_single(run, argv, faults=[f"kill@iteration:rank={rank}:after=3"]) == 0
    ends = ["end"] * rank  # a rank 0 that is killed tells no end
    events = told(tmp_path / "told", 6 + rank)
    assert [event["event"] for event in events] == ["start", "save", *ends, "lost", "start", "save", "end"]
    (lost,) = (event for event in events if event["event"] == "lost")
    assert lost["line"] == f"rank {rank} was killed by SIGKILL (signal 9) in phase 'iteration 3'"
    assert lost["save"] == f"{tmp_path}/run" and "rank" not in lost
    assert [event["status"] for event in events if event["event"] == "end"] == ["failed"] * rank + ["completed"]
    assert [event["iteration"] for event in events if event["event"] == "start"] == [0, 2]


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with moto_server() as port:
        make_bucket(port, "runs")
        served = FaultProxy(port)
        yield served
        served.shutdown()


@pytest.mark.landing
def test_an_upload_that_fails_is_told_and_made_up_for(tmp_path: Path, proxy: FaultProxy) -> None:
    """The store refuses the files of the first save until that has been told."""
    path = tmp_path / "told"
    proxy.plan = lambda method, name: (
        "503" if method in ("PUT", "POST") and "iter_0000002" in name and "upload failed" not in _text(path) else None
    )
    argv = [*FLAGS, "--save", "s3://runs/a", "--checkpoint-staging-path", f"{tmp_path}/staging"]
    waits = [f"pause@iteration:step={step}" for step in (3, 4)]
    assert run_single(run, [*argv, "--on-event", f"tee -a {path}"], faults=waits, env=proxy.environment) == 0
    events = told(path, 5)
    failed = [event for event in events if event["event"] == "upload failed"]
    assert failed and all(event["iteration"] == 2 and event["rank"] == 0 for event in failed)
    assert "503" in failed[0]["problem"] and failed[0]["save"] == "s3://runs/a"
    assert {event["event"] for event in events} == {"start", "save", "upload failed", "end"}
    assert events[-1]["status"] == "completed"


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
