"""Iterations of which no label counts are known by their count, at every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from equivalence.layouts import TINY

from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.data import BatchLoader
from megalite.microbatch import Microbatch
from megalite.observe.observers import read_metrics
from megalite.testing import run_ranks
from megalite.train.run import run_training

LAYOUTS = {
    "tp": ("--tensor-model-parallel-size", "2"),
    "pp": ("--pipeline-model-parallel-size", "2", "--calculate-per-token-loss"),
    "2bw": ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "2bw"),
    "dp": (),
}


def body_masks(world: World, argv: list[str], everywhere: bool) -> int:
    """A run whose second batch has no label that counts: on all ranks, or on the first replica alone."""
    read, calls = BatchLoader.next_batch, iter(range(1, 100))

    def masked(self: BatchLoader, samples: int) -> list[Microbatch]:
        found = read(self, samples)
        if next(calls) == 2 and (everywhere or world.is_first):
            found = [replace(each, loss_mask=torch.zeros_like(each.loss_mask)) for each in found]
        return found

    BatchLoader.next_batch = masked  # type: ignore[method-assign]
    return run_training(parse(argv, world_size=world.size), world)


@pytest.mark.parametrize(("layout", "everywhere"), [("tp", True), ("pp", True), ("2bw", True), ("dp", False)])
def test_a_step_without_a_counted_label_is_known(tmp_path: Path, layout: str, everywhere: bool) -> None:
    argv = [*TINY, "--num-layers", "2", "--micro-batch-size", "2", "--log-interval", "1", "--save", str(tmp_path)]
    argv[argv.index("--train-iters") + 1] = "3"
    assert run_ranks(body_masks, 2, [*argv, *LAYOUTS[layout]], everywhere) == [0, 0]
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if record["kind"] == "train"]
    assert [record.get("uncounted_iterations", 0) for record in records] == [0, int(everywhere), 0]
    assert (records[1]["lm_loss"] == 0.0) is everywhere
