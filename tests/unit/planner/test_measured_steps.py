"""The plan beside steps that an H100 took (benchmarks/results/): time within 10 %, memory within 5 %."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.config import read_unjudged
from megalite.planner import Roofline, load_hardware, predict

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
COMMON = "--bf16 --compile --train-iters 6 --lr 3e-4 --mock-data --tokenizer-type NullTokenizer --eval-iters 0"
GPT = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 50304 "
    "--activation gelu-tanh --micro-batch-size 8 --global-batch-size 32"
)
LLAMA = (
    "--model-type llama --num-layers 6 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 "
    "--ffn-hidden-size 14336 --seq-length 8192 --vocab-size 128256 --untie-embeddings-and-output-weights "
    "--micro-batch-size 1 --global-batch-size 4"
)
STEPS = {
    "AdamW": ("gpu_1b", "megalite-compiled", GPT),
    "Muon": ("gpu_1b", "megalite-muon", f"{GPT} --optimizer muon"),
    "Llama": ("gpu_llama3", "megalite-compiled", LLAMA),
    "fp8": ("gpu_llama3", "megalite-fp8", f"{LLAMA} --fp8 format=hybrid"),
}
"""Record, variant, flags."""


@pytest.mark.parametrize("name", STEPS)
def test_the_plan_is_near_what_was_measured(name: str) -> None:
    record, variant, flags = STEPS[name]
    [case] = json.loads((RESULTS / f"{record}.json").read_text())["cases"]
    measured, hardware = case["variants"][variant], load_hardware("h100")
    found = predict(read_unjudged([*COMMON.split(), *flags.split()])[0], 1, hardware, Roofline(hardware))
    assert found.step_time == pytest.approx(measured["median"], rel=0.1)
    assert found.memory[0].total == pytest.approx(measured["device_mib"] * 2**20, rel=0.05)
