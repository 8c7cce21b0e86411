"""A run that rolls back after a spike is a run that was told beforehand which iterations to pass over."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from equivalence.layouts import TINY, saved_tensors
from megalite.checkpoint import committed, read_manifest
from megalite.comm.world import World
from megalite.config import parse
from megalite.nn.block import Block
from megalite.observe.observers import read_metrics
from megalite.testing import RanksFailed, run_ranks, run_single
from megalite.train.run import open_run, run_training

STEPS, SPIKE = 12, 7
ROLLBACK = ("--spikes", "action=rollback", "sigma=20", "window=6", "back=2", "pass_over=3", "--save-interval", "2")
PASSED = ("6", "7", "8")  # from two iterations before the spike on, three of them
LAYOUTS = {
    "dp2 zero1": ("--zero-stage", "1"),
    "dp2 zero3": ("--zero-stage", "3"),
    "tp2": ("--tensor-model-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
}


def command(folder: Path, *more: str) -> list[str]:
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
    argv[argv.index("--train-iters") + 1] = str(STEPS)
    return [*argv, "--save", str(folder), *more]


def planted_run(world: World, argv: list[str], planted: Collection[int] = (SPIKE,)) -> int:
    """The gradients of the blocks' outputs are forty times what they should be in some iterations."""
    forward = Block.forward
    with open_run(parse(argv, world_size=world.size), world) as opened:
        trainer = opened.trainer

        def broken(self: Block, *inputs: Any) -> torch.Tensor:
            x = forward(self, *inputs)
            return x + 39 * (x - x.detach()) if trainer.iteration + 1 in planted else x

        with patch.object(Block, "forward", broken):
            opened.directory.begin(trainer.iteration)
            trainer.train()
    return 0


def plain_run(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


def ranges(folder: Path) -> list[dict[str, int]]:
    return read_manifest(committed(folder)[-1]).meta.get("passed_over", [])


def rollbacks(folder: Path) -> list[tuple[int, int]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(each["iteration"], each["checkpoint_iteration"]) for each in lines if each["kind"] == "rollback"]


def assert_same(found: Path, wanted: Path, *, bitwise: bool) -> None:
    ours, theirs = (saved_tensors(folder / f"iter_{STEPS:07d}") for folder in (found, wanted))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if bitwise:
            assert torch.equal(ours[name], value), name
        else:
            torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12, msg=name)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("told")
    run_single(plain_run, command(folder, "--iterations-to-skip", *PASSED))
    return folder


def test_a_rollback_is_bitwise_a_run_that_was_told(told: Path, tmp_path: Path) -> None:
    run_single(planted_run, command(tmp_path, *ROLLBACK))
    assert_same(tmp_path, told, bitwise=True)
    assert rollbacks(tmp_path) == [(SPIKE, 4)]
    wanted = {"first": 20, "last": 32, "after": 5, "until": 8}
    assert ranges(tmp_path) == [{**wanted, "rollbacks": 1}] and ranges(told) == [{**wanted, "rollbacks": 0}]
    losses, known = ({r["iteration"]: r["lm_loss"] for r in train_records(f)} for f in (tmp_path, told))
    assert losses == known
    assert [path.name[:12] for path in tmp_path.glob("iter_*.aside-*")] == ["iter_0000006"]
    assert [path.name for path in committed(tmp_path)] == [f"iter_{step:07d}" for step in range(2, STEPS + 1, 2)]


def train_records(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.parametrize(
    "layout", ["tp2", *(pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS if name != "tp2")]
)
def test_any_layout_rolls_back_alike(told: Path, tmp_path: Path, layout: str) -> None:
    """Stopped after five iterations on one rank, continued on two, stopped amid what is passed over, ended on one."""
    run_single(planted_run, command(tmp_path, *ROLLBACK, "--exit-interval", "5"))
    run_ranks(planted_run, 2, command(tmp_path, *ROLLBACK, *LAYOUTS[layout], "--auto-resume", "--exit-interval", "8"))
    assert committed(tmp_path)[-1].name == "iter_0000008" and rollbacks(tmp_path) == [(SPIKE, 5)]
    run_single(planted_run, command(tmp_path, *ROLLBACK, "--auto-resume"))
    assert_same(tmp_path, told, bitwise=False)
    assert ranges(tmp_path)[0]["rollbacks"] == 1


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_2bw_drains_and_rolls_back(tmp_path: Path, world: int) -> None:
    flags = ("--pipeline-schedule", "2bw", "--pipeline-model-parallel-size", str(world), "--staleness-correction")
    flags = (*flags, "predict" if world > 1 else "none")
    run_ranks(planted_run, world, command(tmp_path / "found", *flags, *ROLLBACK))
    # a pipeline that drains before a save or a rollback is another asynchronous run: told to save at the same times
    told = ("--iterations-to-skip", *PASSED, "--save-interval", "2")
    run_ranks(plain_run, world, command(tmp_path / "told", *flags, *told))
    assert rollbacks(tmp_path / "found") == [(SPIKE, 4)]
    assert_same(tmp_path / "found", tmp_path / "told", bitwise=True)


PLACES = {
    "file": ("--offload", "path=FILES", "--ddp-bucket-size", "3000"),
    "delayed": ("--delayed-parameter-update", "--offload", "optimizer", "--save-interval", "2"),
    "params": ("--offload", "params"),
    "experts": ("--num-experts", "4", "--moe-router", "score_function=sigmoid", "expert_bias"),
    "fp8": ("--fp8-format", "e4m3", "--fp8-recipe", "delayed"),
    "soap": ("--optimizer", "soap"),
    "growing": ("--rampup-batch-size", "2", "2", "16"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", PLACES)
def test_state_of_any_kind_and_place_goes_back(name: str, tmp_path: Path) -> None:
    flags = [flag.replace("FILES", str(tmp_path)) for flag in PLACES[name]]
    run_single(planted_run, command(tmp_path / "found", *ROLLBACK, *flags))
    run_single(plain_run, command(tmp_path / "told", "--iterations-to-skip", *PASSED, *flags))
    assert rollbacks(tmp_path / "found") == [(SPIKE, 4)]
    assert_same(tmp_path / "found", tmp_path / "told", bitwise=True)


def test_no_progress_makes_the_range_grow_and_then_ends_the_run(tmp_path: Path) -> None:
    flags = command(tmp_path / "grown", *ROLLBACK)
    run_single(planted_run, flags, (SPIKE, 9))
    assert rollbacks(tmp_path / "grown") == [(7, 4), (9, 4)]
    assert [(each["after"], each["until"], each["rollbacks"]) for each in ranges(tmp_path / "grown")] == [(5, 10, 2)]
    run_single(plain_run, command(tmp_path / "told", "--iterations-to-skip", *PASSED, "9", "10"))
    assert_same(tmp_path / "grown", tmp_path / "told", bitwise=True)
    often = command(tmp_path / "often", *ROLLBACK)
    often[often.index("pass_over=3")] = "pass_over=3,times=1"
    with pytest.raises(RanksFailed, match=r"iteration 9: another spike, after 1 rollbacks .*the samples 20 to 32"):
        run_single(planted_run, often, (SPIKE, 9))


def test_without_an_old_checkpoint_the_update_is_skipped(tmp_path: Path) -> None:
    argv = command(tmp_path / "found", *ROLLBACK)
    argv[argv.index("--save-interval") + 1] = "6"
    run_single(planted_run, argv)
    assert rollbacks(tmp_path / "found") == [] and ranges(tmp_path / "found") == []
    run_single(plain_run, command(tmp_path / "told", "--iterations-to-skip", str(SPIKE)))
    assert_same(tmp_path / "found", tmp_path / "told", bitwise=True)
