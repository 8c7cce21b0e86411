"""Every file of configs/ is rehearsed at its own world size, and a recipe of each wing; memory is as planned."""

from __future__ import annotations

import pytest
from source_tree import ROOT
from unit.config.test_shipped_configs import WORLDS

from megalite.rehearsal import Fault, rehearse_run, rehearsed

CHEAP = {"quickstart", "shakespeare_char", "frontier_22b"}
"""Files that take less than ten seconds of a CPU each."""
SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --global-batch-size 8 --bf16 --lr 1e-2 "
    "--micro-batch-size 1 --train-iters 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --eval-iters 1"
).split()
RECIPES = {
    "experts": (4, "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --zero-stage 1"),
    "context": (2, "--context-parallel-size 2"),
    "offload": (2, "--offload optimizer --zero-stage 2"),
    "weights on the host": (2, "--offload params --zero-stage 3"),
    "adapters": (2, "--lora rank=2 --pipeline-model-parallel-size 2"),
    "2bw": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw --clip-grad 0"),
}


def told(faults: list[Fault]) -> list[str]:
    return [str(fault) for fault in faults]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.landing if n.split(".")[0] in CHEAP else pytest.mark.full) for n in WORLDS],
)
def test_a_shipped_file_passes(name: str) -> None:
    """The first rank of the first and of the last stage, and the last of all."""
    size, _ = WORLDS[name]
    run = rehearsed(["--config", str(ROOT / "configs" / name)], size, steps=1)
    inside = size // run.config.parallel.pipeline_model_parallel_size
    report = rehearse_run(run, [0, size - inside, *([size - 1] if size > 8 else [])])
    assert told(report.faults) == []
    for each in report.memory:
        assert each.planned is not None
        assert each.allocated == pytest.approx(each.planned.total, rel=0.1, abs=256 << 20), each.rank


@pytest.mark.landing
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes(name: str) -> None:
    size, flags = RECIPES[name]
    assert told(list(rehearse_run(rehearsed([*SMALL, *flags.split()], size)).faults)) == []
