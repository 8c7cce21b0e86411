"""Every schedule x stages x micro-batches x family x tied or not: one process's result. All of them under --full."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from equivalence.layouts import FLUSH, TINY, Layout, compare, train
from megalite.config.cli import parse
from megalite.errors import ConfigError

MODELS = [
    ("--model-type", family, tied)
    for family in ("gpt", "llama")
    for tied in ("--untie-embeddings-and-output-weights", "--no-untie-embeddings-and-output-weights")
]


def cases(schedule: str) -> list[Layout]:
    """The legal ones."""
    found = []
    for p, m, model in product((1, 2, 3, 4), (1, 2, 3, 4, 6, 8), MODELS):
        layout = ["--pipeline-model-parallel-size", str(p), "--pipeline-schedule", schedule, "--micro-batch-size", "1"]
        if schedule in ("interleaved", "breadth-first"):
            layout += ["--virtual-pipeline-model-parallel-size", "2"]
        whole = ("--num-layers", "8", "--global-batch-size", str(m), *model)
        case = Layout(whole, tuple(layout), p, delay=int(schedule == "2bw"))
        try:
            parse([*TINY, *case.model, *case.layout], world_size=p)
        except ConfigError:
            continue
        found.append(case)
    return found


@pytest.mark.parametrize("schedule", [*FLUSH, "2bw"])
def test_every_schedule_equals_one_process(schedule: str, full: bool) -> None:
    legal = cases(schedule)
    assert len({case.world_size for case in legal}) >= 2, "a schedule that is legal at one number of ranks only"
    for case in legal if full else random.Random(schedule).sample(legal, 1):
        compare(case)


def test_the_shifted_critical_path_has_the_bits_of_full_recomputation() -> None:
    model = ["--num-layers", "5", "--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--micro-batch-size", "1"]
    ranks = ["--pipeline-model-parallel-size", "3"]
    full = [*TINY, *model, *ranks, "--recompute-granularity", "full", "--recompute-method", "uniform"]
    shifted = [*TINY, *model, *ranks, "--pipeline-schedule", "shifted-critical-path"]
    one, other = train(full, 3, 3), train(shifted, 3, 3)
    assert one.losses == other.losses and one.norms == other.norms
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_two_pairs_of_opposite_pipelines() -> None:
    model = ("--num-layers", "4", "--global-batch-size", "8", "--no-untie-embeddings-and-output-weights")
    layout = ("--pipeline-model-parallel-size", "4", "--pipeline-schedule", "chimera", "--chimera-pairs", "2")
    compare(Layout(model, (*layout, "--micro-batch-size", "1"), 4))
