"""`--cuda-graph-impl`: what is said against it, in one line each, and Megatron-LM's other flags of graphs."""

from __future__ import annotations

import pytest
from config_arguments import argv, problems_of

from megalite.config import parse

ON = "--cuda-graph-impl local"
ROWS = [
    ("--zero-stage 3", "not with --zero-stage=3, whose weights are elsewhere each time; use 0, 1 or 2"),
    ("--num-experts 4", "not with --num-experts, which get another number of tokens each time; drop one"),
    ("--attention-dropout 0.1", "not with --attention-dropout, whose kernel is compiled; drop one"),
    ("--seq-length-schedule 0:64", "not with --seq-length-schedule, whose samples have other lengths; drop one"),
    ("--offload activations=1", "not with --cpu-offloading-num-layers, whose activations move; drop one"),
    ("--recompute-granularity full", "not with --recompute-granularity, which runs blocks twice; drop one"),
    ("--device cpu", "a CPU has none; leave it out"),
]


@pytest.mark.parametrize(("flags", "line"), ROWS)
def test_one_problem_gives_exactly_one_line(flags: str, line: str) -> None:
    assert problems_of(argv(f"{ON} {flags}"), 1) == [f"{ON.replace(' ', '=')}: {line}"]


@pytest.mark.parametrize(
    "flags", [f"{ON} --cuda-graph-scope layer", f"{ON} --cuda-graph-scope full", "--enable-cuda-graph"]
)
def test_spellings_of_megatron(flags: str) -> None:
    assert parse(argv(flags), world_size=1).parallel.hardware.cuda_graph_impl == "local"


def test_parts_of_a_layer_are_refused() -> None:
    (line,) = problems_of(argv(f"{ON} --cuda-graph-scope attn"), 1)
    assert "captures whole layers" in line
