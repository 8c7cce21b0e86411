"""A run under --device-memory-budget-gb has the bits of one without: what moves is the same when it comes back."""

from __future__ import annotations

import pytest
import torch

from equivalence.layouts import TINY, least_budget, train
from megalite.config.cli import parse
from megalite.inventory import lowered_program
from megalite.planner import within_budget
from megalite.schedule import EVICT

PP2 = ("--pipeline-model-parallel-size", "2", "--pipeline-schedule")
CASES = {
    "gpipe": ((*PP2, "gpipe", "--hidden-dropout", "0.1"), 2),
    "breadth-first": ((*PP2, "breadth-first", "--virtual-pipeline-model-parallel-size", "2"), 2),
    "zero 3": ((*PP2, "gpipe", "--zero-stage", "3"), 4),
    "experts": ((*PP2, "gpipe", "--num-experts", "4"), 2),
    "selective": ((*PP2, "gpipe", "--recompute-activations", "--model-type", "llama"), 2),
    "one rank": (("--pipeline-schedule", "gpipe", "--optimizer", "muon"), 1),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name != "gpipe")) for name in CASES])
def test_a_budget_changes_no_bit(name: str) -> None:
    layout, ranks = CASES[name]
    argv = [*TINY, "--num-layers", "4", "--micro-batch-size", "1", *layout]
    under = [*argv, *least_budget(argv, ranks)]
    config = parse(under, world_size=ranks)
    plan = within_budget(config, ranks, on_cpu=True)
    program = lowered_program(config, config.num_microbatches(ranks), plan=plan)
    assert any(action.kind == EVICT for actions in program.unroll(1) for action in actions)
    free, bound = train(argv, ranks, 3), train(under, ranks, 3)
    assert free.losses == bound.losses and free.norms == bound.norms
    assert free.tensors.keys() == bound.tensors.keys()
    assert all(torch.equal(free.tensors[key], bound.tensors[key]) for key in free.tensors)
