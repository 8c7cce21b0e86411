"""Every file of configs/ is rehearsed at its own world size, and a recipe of each wing; memory is as planned.

Each rehearsal starts, trains, evaluates and lists what it would save.
"""

from __future__ import annotations

import pytest
from source_tree import ROOT
from unit.config.test_shipped_configs import WORLDS

from megalite.config import read_unjudged
from megalite.rehearsal import Fault, rehearse_run, rehearsed

DEAR = {"gpt2_345m", "gpt_oss_20b", "llama_7b", "olmo3_7b", "qwen3_30b_a3b", "qwen3_next_80b_a3b"}
"""Files whose stages have many layers: with --landing each replica gets one micro-batch."""
DEAREST = {"qwen3_next_80b_a3b": ["--num-layers", "4"]}
"""Of 48 layers, whose chunks of delta rules are a quarter of a million launches: one of each kind."""
SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --global-batch-size 8 --bf16 --lr 1e-2 "
    "--micro-batch-size 1 --train-iters 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --eval-iters 1"
).split()
SAMPLES = "--sample-interval 2 --sample-prompts there_is_no_such_file.txt"
RECIPES = {
    "experts": (4, "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --zero-stage 1"),
    "context": (2, "--context-parallel-size 2"),
    "offload": (2, "--offload optimizer --zero-stage 2"),
    "weights on the host": (2, "--offload params --zero-stage 3"),
    "adapters": (2, "--lora rank=2 --pipeline-model-parallel-size 2"),
    "2bw": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw --clip-grad 0"),
    "generation": (4, f"--pipeline-model-parallel-size 2 --zero-stage 1 {SAMPLES}"),
}


def told(faults: list[Fault]) -> list[str]:
    return [str(fault) for fault in faults]


def passes(name: str, *more: str) -> None:
    """The first rank of the first and of the last stage, and the last of all."""
    size, _ = WORLDS[name]
    run = rehearsed(["--config", str(ROOT / "configs" / name), *more], size, steps=1)
    inside = size // run.config.parallel.pipeline_model_parallel_size
    report = rehearse_run(run, [0, size - inside, *([size - 1] if size > 8 else [])])
    assert told(report.faults) == []
    for each in report.memory:
        assert each.planned is not None
        assert each.allocated == pytest.approx(each.planned.total, rel=0.1, abs=256 << 20), each.rank


@pytest.mark.landing
@pytest.mark.parametrize("name", WORLDS)
def test_a_shipped_file_passes(name: str) -> None:
    own = name.removesuffix(".yaml")
    config, _ = read_unjudged(["--config", str(ROOT / "configs" / name)])
    batch = WORLDS[name][0] * config.training.micro_batch_size
    one_each = ["--global-batch-size", str(batch)] if own in DEAR else []
    passes(name, *one_each, *DEAREST.get(own, []))


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(DEAR))
def test_a_dear_file_passes_with_its_whole_batch(name: str) -> None:
    passes(f"{name}.yaml")


@pytest.mark.landing
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes(name: str) -> None:
    size, flags = RECIPES[name]
    report = rehearse_run(rehearsed([*SMALL, *flags.split()], size))
    assert told(report.faults) == []
    record = report.records[0]
    assert {"evaluation" in event[4] for event in record.log if event[0] == "phase"} == {True, False}
    assert record.pieces
    if SAMPLES in flags:  # each new token is read
        assert sum(event[0] == "sync" and "generation/" in event[4] for event in record.log) >= 3
