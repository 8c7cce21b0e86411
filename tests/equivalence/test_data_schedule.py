"""Phases of data in a run: the samples of every step at any layout, over resumes at another one, and under kills."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from equivalence.layouts import TINY, assert_close, saved_tensors, train_body
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.config.data import DataConfig
from megalite.data.blend import PhasedDataset
from megalite.data.build import build_datasets
from megalite.data.indexed import IndexedWriter
from megalite.data.tokenizer import NullTokenizer
from megalite.testing import run_ranks, try_ranks
from megalite.train.run import open_run, run_training
from pretrain_gpt import main

SMALL = [flag for flag in TINY if flag != "--mock-data"]
SMALL += ["--num-layers", "2", "--hidden-dropout", "0.1", "--split", "1"]
STEPS = "0:{0}/web.txt 176:{0}/code.txt 400:{0}/both.txt"
"""The second phase begins with sample 11, inside the second batch of 8; the third with sample 25, inside the fourth."""
PP2 = ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "2bw", "--micro-batch-size", "1")
DP2, TP2 = ("--micro-batch-size", "2"), ("--micro-batch-size", "4", "--tensor-model-parallel-size", "2")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, first in (("web", 0), ("code", 7)):
        with IndexedWriter(tmp_path / name, vocab_size=64) as writer:
            for number in range(40):
                writer.add_document((np.arange(number, number + 11) * (first + 1)) % 31)
    lists = {"web": "{0}/web", "code": "{0}/code", "both": "0.5 {0}/web 0.5 {0}/code"}
    for name, words in lists.items():
        (tmp_path / f"{name}.txt").write_text(words.format(tmp_path))
    return tmp_path


def flags(files: Path, save: str, *more: str, steps: str = STEPS) -> list[str]:
    where = ["--data-schedule", steps.format(files), "--data-cache-path", str(files / "cache")]
    return [*SMALL, *where, "--save", str(files / save), *more]


def read_body(world: World, argv: list[str], steps: int) -> list[list[list[int]]]:
    """The tokens that this rank reads in every step."""
    config, seen = parse(argv, world_size=world.size), []
    with open_run(config, world) as run:
        loader = run.trainer.batch_reader.loader
        assert loader is not None
        for _ in range(steps):
            batch = loader.next_batch(8)
            seen.append([row for microbatch in batch for row in microbatch.tokens.tolist()])
    return seen


def test_the_samples_of_a_run_are_those_of_its_lists(files: Path) -> None:
    """Against three data sets of one list each, with the seeds and the numbers of samples of its phases."""
    ranks = run_ranks(read_body, 2, flags(files, "a", *DP2), 5)
    found = [text for step in zip(*ranks, strict=True) for rank in step for text in rank]
    expected = []
    for number, (name, samples) in enumerate((("web", 11), ("code", 14), ("both", 375))):
        alone = build_datasets(
            DataConfig(data_args_path=f"{files}/{name}.txt", split="1"), seq_length=16, train_samples=samples,
            seed=1234 + PhasedDataset.SEED_STEP * number, valid_samples=0, test_samples=0, tokenizer=NullTokenizer(64),
            cache_dir=None,
        ).train  # fmt: skip
        out = np.empty(17, np.int64)
        expected += [alone.read(n, out) and out[:16].tolist() for n in range(min(samples, 15))]
    assert sorted(found) == sorted(expected)
    for step in range(5):
        assert sorted(found[8 * step : 8 * step + 8]) == sorted(expected[8 * step : 8 * step + 8]), f"step {step + 1}"


@pytest.mark.parametrize("stopped", [2, *(pytest.param(n, marks=pytest.mark.landing) for n in (1, 4))])
def test_the_order_is_exact_over_a_resume_at_another_layout(stopped: int, files: Path) -> None:
    """Stopped in the first, the second and the third phase; it begins with other files for the phases to come."""
    whole = run_ranks(train_body, 1, flags(files, "whole", *DP2), 6)[0][0]
    here, there = (DP2, TP2) if stopped == 2 else (TP2, DP2)
    steps = {1: "0:{0}/web.txt 176:{0}/both.txt 400:{0}/web.txt", 2: STEPS.replace("both", "web")}.get(stopped, STEPS)
    begun = run_ranks(train_body, 2, flags(files, "part", *here, steps=steps), stopped)[0][0]
    rest = run_ranks(train_body, 2, flags(files, "part", "--auto-resume", *there), 6 - stopped)[0][0]
    assert_close([*begun, *rest], whole, 1e-12, "loss")
    found, expected = saved_tensors(files / "part"), saved_tensors(files / "whole")
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= 1e-11, name


def test_phases_to_come_may_change_and_those_begun_may_not(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = [*DP2, "--auto-resume", "--log-interval", "1", "--device", "cpu"]
    assert main(flags(files, "run", *run, "--exit-interval", "2")) == 0
    (files / "both.txt").write_text(f"0.1 {files}/web 0.9 {files}/code")
    assert main(flags(files, "run", *run, "--exit-interval", "3")) == 0, "the third phase has not begun"
    (files / "code.txt").write_text(f"{files}/web")
    for more in ([], ["--dry-run"]):
        capsys.readouterr()
        assert main(flags(files, "run", *run, "--exit-interval", "4", *more)) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and f"--data-schedule: phase 2 ({files}/code.txt) has begun" in told
    assert main(flags(files, "run", *run, "--exit-interval", "4", "--allow-data-change")) == 0
    (files / "code.txt").write_text(f"{files}/code")
    late = "0:{0}/web.txt 192:{0}/code.txt 400:{0}/both.txt"
    assert main(flags(files, "run", *run, "--exit-interval", "5", steps=late)) == 2
    assert "has begun and is now from sample 12 (checkpoint 11)" in capsys.readouterr().err


def whole_run(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


POINTS = ("iteration", "save.begin", "save.shard_written", "save.before_rename")


@pytest.mark.in_turn
@pytest.mark.parametrize("layout", [DP2, PP2, TP2], ids=["dp2", "2bw", "tp2"])
def test_no_kill_loses_the_phase(layout: tuple[str, ...], files: Path, full: bool) -> None:
    """20 kills each with --full."""
    argv = flags(files, "whole", *layout, "--save-interval", "1")
    argv[argv.index("--train-iters") + 1] = "6"
    run_ranks(whole_run, 2, argv)
    expected, rng, killed, trial = saved_tensors(files / "whole"), random.Random(str(layout)), 0, 0
    while killed < (20 if full else 1):
        trial += 1
        again = [*argv, "--auto-resume"]
        again[again.index("--save") + 1] = str(files / f"killed{trial}")
        point, rank = rng.choice(POINTS), rng.randrange(2)
        fault = f"kill@{point}:rank={rank}:after={rng.randrange(1, 7)}"
        killed += try_ranks(whole_run, 2, again, faults=[fault]).outcome.culprit is not None
        run_ranks(whole_run, 2, again)
        found = saved_tensors(files / f"killed{trial}")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"{fault}: {name}"
