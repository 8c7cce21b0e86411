"""`--compile` under every schedule that splits the backward, and beside what touches weights, gradients and messages:
the oracle's result. Only under --full: every layout takes a compiler to its blocks.
"""

from __future__ import annotations

import pytest

from equivalence.layouts import Layout, compare

GPT = ("--num-layers", "4", "--hidden-dropout", "0.1")
LLAMA = (
    "--num-layers", "4", "--model-type", "llama", "--untie-embeddings-and-output-weights",
)  # fmt: skip
PIPELINE = ("--pipeline-model-parallel-size", "2", "--micro-batch-size", "1", "--pipeline-schedule")
LAYOUTS = {
    **{schedule: Layout(GPT, (*PIPELINE, schedule), 2) for schedule in ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")},
    "2bw": Layout(GPT, (*PIPELINE, "2bw"), 2, delay=1),
    "zero-3": Layout(LLAMA, ("--zero-stage", "3", "--micro-batch-size", "2"), 2),
    "experts": Layout(
        (*LLAMA, "--num-experts", "4", "--moe-router", "score_function=sigmoid", "expert_bias"),
        ("--expert-model-parallel-size", "2", *PIPELINE, "zb-h1"),
        4,
    ),
    "tensor": Layout(LLAMA, ("--tensor-model-parallel-size", "2", "--micro-batch-size", "2"), 2),
    "sequence": Layout(
        GPT,
        ("--tensor-model-parallel-size", "2", "--sequence-parallel", *PIPELINE, "zb-h1"),
        4,
    ),
    "recomputed": Layout(
        GPT, ("--recompute-granularity", "full", "--recompute-num-layers", "1", *PIPELINE, "zb-h1"), 2
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_layouts_equal_one_process(name: str) -> None:
    case = LAYOUTS[name]
    # the first step waits for a compiler on every rank
    patient = ("--compile", "--distributed-timeout-minutes", "10")
    compare(Layout(case.model, (*case.layout, *patient), case.world_size, case.delay), timeout=600)
