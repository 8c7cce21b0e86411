"""Watching a run never changes it."""

from __future__ import annotations

from pathlib import Path

import torch
from equivalence.layouts import TINY, saved_tensors

from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.observe.observers import read_metrics
from megalite.testing import run_single
from megalite.train.run import run_training

RUN = [*TINY, "--num-layers", "2", "--micro-batch-size", "4", "--hidden-dropout", "0.1"]


def body(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


def test_a_watched_run_has_the_same_bits(tmp_path: Path) -> None:
    argv = [*RUN]
    argv[argv.index("--train-iters") + 1] = "4"
    alone, watched = tmp_path / "alone", tmp_path / "watched"
    assert run_single(body, [*argv, "--save", str(alone), "--log-interval", "100"]) == 0
    observers = ["--log-interval", "1", "--profile", "--profile-step-start", "2", "--profile-step-end", "4"]
    trackers = ["--tensorboard-dir", str(watched / "tensorboard"), "--wandb-project", "tiny"]
    silent = {"WANDB_SILENT": "true", "HOME": str(tmp_path)}
    flags = [*argv, "--save", str(watched), *observers, *trackers]
    assert run_single(body, flags, env=silent, timeout=120) == 0
    expected, found = saved_tensors(alone), saved_tensors(watched)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert len([record for record in read_metrics(watched / "metrics.jsonl") if record["kind"] == "train"]) == 4
    assert (watched / "profile" / "trace_rank0_iterations_2-3.json").exists()
    assert list((watched / "tensorboard").iterdir())
    assert list((watched / "wandb").glob("offline-run-*"))
