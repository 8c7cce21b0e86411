"""Flags that move numbers without changing them reach the parts that move them: same losses, other places."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
from equivalence.layouts import Layout, compare

from megalite.comm.world import World
from megalite.config import parse
from megalite.parallel.tiers import ActivationOffload
from megalite.parallel.zero import ShardedOptimizer
from megalite.train.run import run_training

BASE = (
    "--num-layers 3 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-2 --train-iters 3 --mock-data --vocab-size 64 --eval-iters 0 --bf16 "
    "--log-interval 1 --device cpu --num-workers 0"
)


def losses(folder: Path, flags: str) -> tuple[list[float], dict[str, int], int]:
    """Losses of a run, bytes that its optimizer holds, layers whose activations were offloaded."""
    optimizers: list[ShardedOptimizer] = []
    entered: list[bool] = []
    original, enter = ShardedOptimizer.__init__, ActivationOffload._enter

    def remember(self: ShardedOptimizer, *args: object, **kwargs: object) -> None:
        optimizers.append(self)
        original(self, *args, **kwargs)  # type: ignore[arg-type]

    def count(self: ActivationOffload, first: bool, *more: object) -> None:
        entered.append(first)
        enter(self, first, *more)  # type: ignore[arg-type]

    config = parse([*BASE.split(), "--save", str(folder), *flags.split()])
    with (
        mock.patch.object(ShardedOptimizer, "__init__", remember),
        mock.patch.object(ActivationOffload, "_enter", count),
    ):
        run_training(config, World())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["lm_loss"] for line in lines if line["kind"] == "train"], optimizers[0].memory(), len(entered)


def test_store_param_remainders(tmp_path: Path) -> None:
    plain, full, _ = losses(tmp_path / "plain", "")
    packed, half, _ = losses(tmp_path / "packed", "--optimizer-state param_remainders")
    assert plain == packed
    assert half["master"] * 2 == full["master"] > 0


@pytest.mark.parametrize("fraction", ["0.5", "1"])
def test_optimizer_cpu_offload(tmp_path: Path, fraction: str) -> None:
    plain, resident, _ = losses(tmp_path / "plain", "--ddp-bucket-size 2000")
    flags = f"--ddp-bucket-size 2000 --offload optimizer fraction={fraction}"
    moved, held, _ = losses(tmp_path / "moved", flags)
    assert plain == moved
    assert resident["offloaded"] == 0 < held["offloaded"]
    assert (held["master"] == 0) == (fraction == "1")


def test_cpu_offloading_num_layers(tmp_path: Path) -> None:
    plain, _, none = losses(tmp_path / "plain", "")
    moved, _, entered = losses(tmp_path / "moved", "--offload activations=2")
    assert plain == moved
    assert none == 0 and entered == 2 * 2 * 3, "two layers, two micro-batches, three iterations"


@pytest.mark.parametrize("stage", [*(pytest.param(s, marks=pytest.mark.landing) for s in "12"), "3"])
def test_two_instances_of_two_ranks_train_what_one_process_trains(stage: str) -> None:
    flags = ("--micro-batch-size", "1", "--zero-stage", stage, "--num-distributed-optimizer-instances", "2")
    compare(Layout(("--num-layers", "4"), flags, 4))
