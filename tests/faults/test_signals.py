"""SIGTERM and its like at every moment of a run: before training one line, then a checkpoint and status 0."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_run_ends import command, records, saved

from megalite.comm.world import World
from megalite.config import Config
from megalite.config.cli import parse
from megalite.generation import Generator
from megalite.launch import EndAtOnce
from megalite.launch.launcher import LaunchEnvironment, launch
from megalite.launch.signals import ear, ends_at_once
from megalite.testing import run_ranks, run_single
from megalite.train.run import run_training
from megalite.train.trainer import Trainer
from megalite.train.validation import Validator
from pretrain_gpt import configure_logging

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 1 "
    "--lr 1e-3 --mock-data --vocab-size 64"
).split()


def main_starts_up(config: Config, world: World) -> None:
    """The last rank asks for the end of all: of their launcher, where there is one."""
    world.report_phase("start-up: model")
    if world.size > 1:
        dist.barrier()
    if world.rank == world.size - 1:
        os.kill(os.getppid() if world.size > 1 else os.getpid(), int(os.environ["MEGALITE_TEST_SIGNAL"]))
    time.sleep(60)


def body_launch(world: World, *flags: str) -> int:
    EndAtOnce().install()
    return launch(parse([*FLAGS, *flags]), main_starts_up, LaunchEnvironment())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_before_training_all_ranks_end_with_one_line(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    number = int(getattr(signal, name))
    environment = {"MEGALITE_TEST_SIGNAL": str(number), "OMP_NUM_THREADS": None}
    assert run_single(body_launch, "--nprocs", "3", env=environment) == 128 + number
    lines = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("---")]
    assert lines == [f"error: ended by {name} in phase 'start-up: model'; nothing was saved"]


def test_the_programs_own_start_is_ended_by_one_line(tmp_path: Path) -> None:
    """One process, which imports torch: an exception raised there would be lost, and the run go on."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\nexcept BaseException:\n    pass\n"
    )
    argv = [sys.executable, "pretrain_gpt.py", *FLAGS]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (143, "")
    assert done.stderr == "error: ended by SIGTERM; nothing was saved\n"


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.in_turn
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in Linux's /proc")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", pytest.param("SIGINT", marks=pytest.mark.full)])
@pytest.mark.parametrize("whom", ["parent", "worker"])
def test_a_killed_tokenisation_leaves_no_process_and_no_half_file(tmp_path: Path, name: str, whom: str) -> None:
    (tmp_path / "c.jsonl").write_text(('{"text": "' + "hello brave new world " * 50 + '"}\n') * 50_000)
    argv = [sys.executable, "tools/preprocess_data.py", "--input", str(tmp_path / "c.jsonl"), "--workers", "2"]
    argv += ["--output-prefix", str(tmp_path / "out")]
    running = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    partial = tmp_path / "out_text_document.bin.partial"
    while running.poll() is None and not (partial.exists() and partial.stat().st_size):
        time.sleep(0.01)
    workers = children(running.pid)
    os.kill(running.pid if whom == "parent" else workers[0], getattr(signal, name))
    try:
        _, errors = running.communicate(timeout=30)  # until the last process has closed its end
    finally:
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)
    assert not list(tmp_path.glob("out*.idx")) and partial.exists()
    if whom == "worker":
        assert running.returncode == 1 and "error: --workers: a worker ended (exit status " in errors, errors
        assert "Traceback" not in errors
    else:
        assert running.returncode in (-getattr(signal, name), 130), errors
    assert not (tmp_path / "out_text_document.bin").exists()


def body_waits_in_a_library(world: World) -> None:
    """The main thread is inside a lock of C's and runs no Python when the signal comes."""
    EndAtOnce(lambda: "start-up self-test").install()
    assert ends_at_once()
    listen = ear()

    def beat() -> None:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            listen()
            time.sleep(0.05)

    threading.Thread(target=beat, daemon=True).start()
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def test_a_rank_that_waits_in_a_library_hears() -> None:
    run_ranks(body_waits_in_a_library, 1, expect="exited with status 143", timeout=30)


def whole_run(world: World, argv: list[str], at: str = "") -> int:
    """A training. at: where rank 1 gets SIGTERM: at the second batch of an evaluation (or at its first, the only
    batch), among samples, or after the loop."""
    if world.rank == 1 and at in ("evaluation", "only batch"):
        losses, calls, chosen = Validator._losses, iter(range(1000)), int(at == "evaluation")

        def evaluated(self: Validator, microbatches: Any) -> Any:
            if next(calls) == chosen:
                os.kill(os.getpid(), signal.SIGTERM)
            return losses(self, microbatches)

        Validator._losses = evaluated  # type: ignore[method-assign]
    if world.rank == 1 and at == "samples":
        episode = Generator._episode

        def episode_with_a_signal(self: Generator, *arguments: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            episode(self, *arguments)

        Generator._episode = episode_with_a_signal  # type: ignore[method-assign]
    if at == "after":
        train = Trainer.train

        def trained(self: Trainer) -> str:
            status = train(self)
            os.kill(os.getpid(), signal.SIGTERM)
            return status

        Trainer.train = trained  # type: ignore[method-assign]
    return run_training(parse(argv, world_size=world.size), world)


EVALUATES = ("--eval-iters", "50", "--tensor-model-parallel-size")


@pytest.mark.parametrize("layout", ["1", pytest.param("2", marks=pytest.mark.full)])
def test_an_evaluation_is_cut_short_and_the_state_before_it_saved(tmp_path: Path, layout: str) -> None:
    argv = command(tmp_path, *EVALUATES, layout, "--eval-interval", "2")
    assert run_ranks(whole_run, 2, argv, "evaluation") == [0, 0]
    assert saved(tmp_path) == ["iter_0000002"], "not one iteration more"
    assert records(tmp_path, "summary")[-1]["status"] == "exit_signal" and not records(tmp_path, "valid")


def test_no_iteration_follows_an_evaluation_whose_last_batch_met_a_signal(tmp_path: Path) -> None:
    argv = command(tmp_path, "--eval-iters", "1", "--eval-interval", "2")
    assert run_ranks(whole_run, 2, argv, "only batch") == [0, 0]
    assert saved(tmp_path) == ["iter_0000002"]
    assert records(tmp_path, "summary")[-1]["status"] == "exit_signal" and len(records(tmp_path, "valid")) == 1


@pytest.mark.landing
def test_the_last_evaluation_is_cut_short_and_made_up_for(tmp_path: Path) -> None:
    argv = command(tmp_path, *EVALUATES, "1", "--auto-resume", steps=2)
    assert run_ranks(whole_run, 2, argv, "evaluation") == [0, 0]
    assert saved(tmp_path) == ["iter_0000002"] and not (tmp_path / "COMPLETED").exists()
    assert run_ranks(whole_run, 2, argv) == [0, 0]
    assert (tmp_path / "COMPLETED").exists() and len(records(tmp_path, "valid")) == 1


@pytest.mark.landing
def test_samples_end_before_a_signal_is_obeyed(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("3 5 7\n")
    samples = ("--sample-interval", "2", "--sample-prompts", str(tmp_path / "prompts.txt"), "--sample-tokens", "4")
    argv = command(tmp_path / "run", *samples, "--pipeline-model-parallel-size", "2")
    assert run_ranks(whole_run, 2, argv, "samples") == [0, 0]
    assert records(tmp_path / "run", "summary")[-1]["status"] == "exit_signal"
    assert len((tmp_path / "run" / "samples.jsonl").read_text().splitlines()) == 1
    assert saved(tmp_path / "run") == ["iter_0000003"]


def test_a_second_signal_does_not_tear_a_save_in_the_background(tmp_path: Path) -> None:
    argv = command(tmp_path, "--async-save", "--exit-interval", "2")
    faults = ["pause@save.before_rename:rank=0"]
    assert run_ranks(whole_run, 2, argv, "after", faults=faults) == [0, 0]
    assert saved(tmp_path) == ["iter_0000002"] and not list(tmp_path.glob("*.tmp-*"))


def body_interrupted(world: World, argv: list[str], times: int) -> int:
    """A run of one process, or of ranks and their launcher, in which Ctrl-C comes in the second iteration. times: then
    it is waited until that often."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored
    step, steps = Trainer.train_step, itertools.count(1)
    config = parse(argv)

    def stepped(self: Trainer, **how: bool) -> Any:
        if next(steps) == 2 and self.mesh.world.is_first:
            for _ in range(times):
                os.kill(os.getppid() if config.parallel.nprocs else os.getpid(), signal.SIGINT)
                time.sleep(0.6)
        return step(self, **how)

    def trains(config: Config, world: World) -> int:
        configure_logging(world.rank)
        return run_training(config, world)

    Trainer.train_step = stepped  # type: ignore[method-assign]
    return launch(config, trains, LaunchEnvironment())


@pytest.mark.parametrize("ranks", [(), ("--nprocs", "2", "--pipeline-model-parallel-size", "2", "--max-restarts", "1")])
def test_ctrl_c_saves_and_another_does_not_wait(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], ranks: tuple[str, ...]
) -> None:
    argv = command(tmp_path, "--auto-resume", *ranks, steps=100)
    environment = {"OMP_NUM_THREADS": None}
    assert run_single(body_interrupted, argv, 1, env=environment) == 130
    said = capfd.readouterr().out
    assert saved(tmp_path) == ["iter_0000003"] and not (tmp_path / "run.lock").exists(), said
    assert records(tmp_path, "summary")[-1]["status"] == "exit_signal"
    assert "received SIGINT: the run ends after iteration 3, the one after this" in said, said
    assert said.count("; newest checkpoint: iter_0000003; --auto-resume continues from it\n") == 1, said
    assert "error:" not in said and "took over" not in said and " stopped (exit_signal) at iteration 3 after " in said

    assert run_single(body_interrupted, argv, 2, env=environment) == 130
    said = capfd.readouterr().out
    assert saved(tmp_path) == ["iter_0000003"]
    assert said.count("error: interrupted by SIGINT in phase 'iteration 5'; what was done after the newest") == 1, said
    if not ranks:
        assert records(tmp_path, "summary")[-1]["status"] == "interrupted"
        assert " interrupted at iteration 4 after " in said and "% of it" not in said
        assert "; newest checkpoint: iter_0000003; --auto-resume continues from it\n" in said
    assert (tmp_path / "run.lock").exists() == bool(ranks), "killed ranks cannot give it back"


def test_ctrl_c_ends_a_run_at_once_that_saves_nothing(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = command(tmp_path, steps=100)
    at = argv.index("--save")
    assert run_single(body_interrupted, argv[:at] + argv[at + 2 :], 1, env={"OMP_NUM_THREADS": None}) == 130
    said = capfd.readouterr().out
    assert " interrupted at iteration 1 after " in said and "; nothing was saved (no --save)\n" in said, said


@pytest.mark.landing
def test_without_its_handler_a_run_leaves_signals_to_the_system(tmp_path: Path) -> None:
    argv = [sys.executable, "pretrain_gpt.py", *command(tmp_path, "--no-exit-signal-handler", steps=100_000)]
    running = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    next(line for line in running.stdout if re.search(r"iteration +3/", line))
    running.terminate()
    running.stdout.read()
    assert running.wait(60) == -signal.SIGTERM
