"""How a run ends: interval, duration, signals in bad moments, numbers that are not finite; and what is left behind."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from equivalence.layouts import TINY, saved_tensors

from megalite.checkpoint import committed
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.nn.block import Block
from megalite.observe import observers
from megalite.observe.observers import read_metrics
from megalite.streams import Stream
from megalite.testing import RanksFailed, run_ranks, run_single
from megalite.train.run import open_run, run_training

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {
    "dp": (),
    "tp": ("--tensor-model-parallel-size", "2"),
    "pp": ("--pipeline-model-parallel-size", "2"),
    "zero2": ("--zero-stage", "2"),
}


def sampled(cases: Iterable[tuple], always: set[tuple]) -> list[Any]:
    """All cases with --full, else those in `always`."""
    return [pytest.param(*case, marks=() if case in always else pytest.mark.full) for case in cases]


def command(folder: Path, *more: str, steps: int = 6) -> list[str]:
    argv = [flag for flag in TINY if flag != "--no-exit-signal-handler"]
    argv[argv.index("--train-iters") + 1] = str(steps)
    return [*argv, "--num-layers", "2", "--micro-batch-size", "2", "--log-interval", "1", "--save", str(folder), *more]


def whole_run(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == kind]


def saved(folder: Path) -> list[str]:
    return [path.name for path in committed(folder)]


def test_interval_stops_saves_and_the_last_multiple_completes(tmp_path: Path) -> None:
    argv = command(tmp_path, "--exit-interval", "3", "--auto-resume")
    assert run_single(whole_run, argv) == 0
    assert records(tmp_path, "summary")[-1]["status"] == "exit_interval"
    assert saved(tmp_path) == ["iter_0000003"] and not (tmp_path / "COMPLETED").exists()
    assert run_single(whole_run, argv) == 0
    assert records(tmp_path, "summary")[-1]["status"] == "completed"
    assert saved(tmp_path) == ["iter_0000003", "iter_0000006"] and (tmp_path / "COMPLETED").read_text() == "6\n"
    assert [record["iteration"] for record in records(tmp_path, "train")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.landing
def test_what_waits_for_the_interpreters_end_does_not_hold_up_a_run_that_is_done(tmp_path: Path) -> None:
    """Neither a library's last words nor the tearing down of torch: "completed" is followed by the exit."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, time\natexit.register(time.sleep, 600)\n")
    offload = ["--zero-stage", "2", "--offload", "optimizer", "--cpu-offloading-num-layers", "1", "--num-workers", "2"]
    argv = [sys.executable, "pretrain_gpt.py", *command(tmp_path / "run", *offload, steps=1), "--nprocs", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "completed at iteration 1" in done.stdout, done.stderr
    assert (tmp_path / "run" / "COMPLETED").exists()


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_older(tmp_path: Path) -> None:
    argv = command(tmp_path, "--save-interval", "1", "--auto-resume", steps=4)
    assert run_single(whole_run, [*argv, "--exit-interval", "3"]) == 0
    (tmp_path / "iter_0000003" / "COMMITTED").unlink()
    assert run_ranks(whole_run, 2, argv) == [0, 0]
    assert saved(tmp_path) == [f"iter_000000{step}" for step in (1, 2, 3, 4)]
    assert len(list(tmp_path.glob("iter_0000003.damaged-*"))) == 1
    (tmp_path / "metrics.jsonl").rename(tmp_path / "moved")
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RanksFailed, match="CheckpointError: --save=.*: metrics.jsonl is a directory"):
        run_ranks(whole_run, 2, argv)


def test_duration_stops_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(whole_run, 2, command(tmp_path, "--exit-duration-in-mins", "1e-6")) == [0, 0]
    assert records(tmp_path, "summary")[-1]["status"] == "exit_duration"
    assert saved(tmp_path) == ["iter_0000001"]


@pytest.mark.parametrize(
    ("layout", "point"),
    sampled(
        itertools.product(LAYOUTS, ("save.shard_written", "save.before_rename")),
        {("dp", "save.shard_written"), ("pp", "save.before_rename")},
    ),
)
def test_signals_during_a_save_never_tear_it(tmp_path: Path, point: str, layout: str) -> None:
    rank = 1 if point == "save.shard_written" else 0
    faults = [f"terminate@{point}:rank={rank}:step=2", f"terminate@{point}:rank={rank}:step=3"]
    argv = command(tmp_path, "--save-interval", "2", *LAYOUTS[layout])
    assert run_ranks(whole_run, 2, argv, faults=faults) == [0, 0]
    assert saved(tmp_path) == ["iter_0000002", "iter_0000003"], "the first signal ends the run after the next iteration"
    assert records(tmp_path, "summary")[-1]["status"] == "exit_signal"
    assert not list(tmp_path.glob("*.tmp-*"))
    assert saved_tensors(tmp_path)  # every byte is verified


def body_not_finite(world: World, argv: list[str], bad: int) -> int:
    """Rank `bad` computes a NaN in iteration 3."""
    forward = Block.forward
    with open_run(parse(argv, world_size=world.size), world) as opened:
        trainer = opened.trainer

        def broken(self: Block, *inputs: Any) -> torch.Tensor:
            x = forward(self, *inputs)
            return x * torch.nan if world.rank == bad and trainer.iteration == 2 else x

        Block.forward = broken  # type: ignore[method-assign]
        opened.directory.begin(0)
        trainer.train()
    return 0


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("layout", "bad"), sampled(itertools.product(LAYOUTS, (0, 1)), {("dp", 1), ("tp", 0), ("pp", 1)})
)
def test_a_number_that_is_not_finite_is_skipped_by_all(tmp_path: Path, layout: str, bad: int) -> None:
    argv = command(tmp_path, "--save-interval", "1", "--nonfinite", "skip", *LAYOUTS[layout], steps=4)
    run_ranks(body_not_finite, 2, argv, bad)
    lines = records(tmp_path, "train")
    assert [line["skipped_iterations"] for line in lines] == [0, 0, 1, 0]
    assert [line["grad_norm"] is None for line in lines] == [False, False, True, False]
    assert [line["consumed_samples"] for line in lines] == [8, 16, 24, 32], "its data are passed over"
    second, third, fourth = (saved_tensors(tmp_path / f"iter_000000{step}") for step in (2, 3, 4))
    assert all(torch.equal(third[name], value) for name, value in second.items())
    assert not all(torch.equal(fourth[name], value) for name, value in second.items())


@pytest.mark.parametrize("layout", ["dp", pytest.param("tp", marks=pytest.mark.full), "pp"])
def test_a_number_that_is_not_finite_stops_all_before_the_update(tmp_path: Path, layout: str) -> None:
    argv = command(tmp_path, "--save-interval", "1", *LAYOUTS[layout])
    expected = r"update 3: the gradient norm is nan \(here in the gradient of (embedding|layers).*\); stopped before"
    run_ranks(body_not_finite, 2, argv, 1, expect=expected)
    assert saved(tmp_path) == ["iter_0000001", "iter_0000002"]
    assert records(tmp_path, "summary")[-1]["status"] == "failed"


def test_updates_that_are_all_skipped_end_the_run_and_are_not_saved(tmp_path: Path) -> None:
    """fp16 at its smallest scale (here all others too): the weights stand still, and the run must not look complete."""
    good = [
        "--no-fp64",
        "--fp16",
        "--initial-loss-scale",
        "1",
        "--keep-last-n",
        "1",
        "--auto-resume",
        "--save-interval",
        "1",
    ]
    assert run_single(whole_run, command(tmp_path, *good, "--exit-interval", "2", steps=20)) == 0
    bad = command(tmp_path, *good, "--loss-scale", "1e30", "--loss-scaling", "max_skipped=4", steps=20)
    message = r"update 6: the last 4 were skipped, .* loss scale of 1e\+30 cannot fall \(--max-skipped-updates=4\)"
    run_ranks(whole_run, 2, [*bad, *LAYOUTS["pp"]], expect=message)
    assert saved(tmp_path) == ["iter_0000003"], "one overflow is no reason to distrust"
    assert records(tmp_path, "summary")[-1]["status"] == "failed"
    short = [*bad[: bad.index("--train-iters")], *bad[bad.index("--train-iters") + 2 :], "--train-iters", "6"]
    with pytest.raises(RanksFailed, match="iteration 6: the last 3 were skipped"):
        run_single(whole_run, short)
    assert not (tmp_path / "COMPLETED").exists()


def body_logs_nowhere(world: World, argv: list[str]) -> tuple[int, str]:
    """The run with its standard output and metrics on a full disk; returns its status and what standard error said."""
    err = io.StringIO()
    with open("/dev/full", "w") as full, patch.object(observers, "METRICS_FILE", "full"):
        sys.stdout, before = Stream(full, "standard output", err), sys.stdout  # type: ignore[assignment]
        try:
            return whole_run(world, argv), err.getvalue()
        finally:
            sys.stdout = before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_logging_that_can_not_be_written_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").symlink_to("/dev/full")  # of a link that is called metrics.jsonl the start says no
    status, said = run_single(body_logs_nowhere, command(tmp_path))
    assert status == 0 and (tmp_path / "COMPLETED").exists()
    assert said.startswith("standard output failed (No space left on device)") and said.count("\n") == 1
    assert capfd.readouterr().out.count("/full did not start, training continues: OSError") == 1


def test_closed_streams_become_the_null_device(tmp_path: Path) -> None:
    """Else the first file that is opened takes the number of standard output, and is printed into."""
    program = "from megalite.streams import keep_streams\nkeep_streams()\n" + (
        "import os, sys\nfile = open(sys.argv[1], 'w')\nos.write(1, b'printed')\nprint('printed', flush=True)\n"
    )
    closed = f"exec {sys.executable} -c '{program.replace(chr(39), chr(34))}' {tmp_path / 'file'} >&- 2>&-"
    assert subprocess.run(["bash", "-c", closed], cwd=ROOT, timeout=60).returncode == 0
    assert (tmp_path / "file").read_text() == ""
