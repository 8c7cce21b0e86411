"""A run that skips a spike of the gradient is a run that was told beforehand to pass over its iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from equivalence.layouts import TINY, saved_tensors
from megalite.comm.world import World
from megalite.config import parse
from megalite.nn.block import Block
from megalite.observe.observers import read_metrics
from megalite.testing import RanksFailed, run_ranks, run_single
from megalite.train.run import open_run, run_training

PLANTED = 7
LAYOUTS = {
    "dp2 zero1": ("--zero-stage", "1"),
    "tp2": ("--tensor-model-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
}
SPIKES = ("--spikes", "action=skip", "sigma=6", "window=6")


def command(folder: Path, *more: str, steps: int = 9) -> list[str]:
    argv = [
        *TINY,
        "--num-layers",
        "2",
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "4",
        "--log-interval",
        "1",
        "--ema-decay",
        "0.9",
    ]
    argv[argv.index("--train-iters") + 1] = str(steps)
    return [*argv, "--save", str(folder), *more]


def planted_run(world: World, argv: list[str]) -> int:
    """The gradients of the blocks' outputs are forty times what they should be in one iteration."""
    forward = Block.forward
    with open_run(parse(argv, world_size=world.size), world) as opened:
        trainer = opened.trainer

        def broken(self: Block, *inputs: Any) -> torch.Tensor:
            x = forward(self, *inputs)
            return x + 39 * (x - x.detach()) if trainer.iteration == PLANTED - 1 else x

        with patch.object(Block, "forward", broken):
            opened.directory.begin(trainer.iteration)
            trainer.train()
    return 0


def plain_run(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


def last(folder: Path) -> dict[str, torch.Tensor]:
    return saved_tensors(folder / "iter_0000009")


def skipped(folder: Path) -> list[int]:
    records = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
    return [record["iteration"] for record in records if record["skipped_iterations"]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("told")
    run_single(plain_run, command(folder, "--iterations-to-skip", str(PLANTED)))
    return folder


def test_the_spike_is_skipped_bit_for_bit(told: Path, tmp_path: Path) -> None:
    run_single(planted_run, command(tmp_path, *SPIKES))
    assert skipped(tmp_path) == [PLANTED]
    wanted, found = last(told), last(tmp_path)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_decide_alike_and_a_resume_remembers(told: Path, tmp_path: Path, layout: str) -> None:
    """Stopped after five iterations on one rank, continued on two: the window is the checkpoint's."""
    run_single(planted_run, command(tmp_path, *SPIKES, "--exit-interval", "5"))
    run_ranks(planted_run, 2, command(tmp_path, *SPIKES, *LAYOUTS[layout], "--auto-resume"))
    assert skipped(tmp_path) == [PLANTED]
    found = last(tmp_path)
    for name, value in last(told).items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_2bw_skips_what_one_process_of_2bw_skips(tmp_path: Path) -> None:
    flags = (*SPIKES, "--pipeline-schedule", "2bw")
    run_single(planted_run, command(tmp_path / "one", *flags))
    run_ranks(planted_run, 2, command(tmp_path / "two", *flags, *LAYOUTS["dp2 zero1"]))
    assert skipped(tmp_path / "one") == skipped(tmp_path / "two") != []
    for name, value in last(tmp_path / "one").items():
        torch.testing.assert_close(last(tmp_path / "two")[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_log_leaves_the_run_alone_and_stop_ends_it(tmp_path: Path) -> None:
    run_single(plain_run, command(tmp_path / "plain"))
    run_single(plain_run, command(tmp_path / "log", "--spikes", "action=log", "sigma=0.1", "window=2"))
    wanted, found = last(tmp_path / "plain"), last(tmp_path / "log")
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    with pytest.raises(RanksFailed, match=rf"update {PLANTED}: the gradient norm of .* is above .*; stopped before"):
        run_single(planted_run, command(tmp_path / "stop", "--spikes", "action=stop", "window=6"))
