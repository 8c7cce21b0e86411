"""`--decoupled-lr`: embedding and output layer have a learning rate of their own at every layout, and after a resume.

The reference is one process: torch's own optimizers, one a parameter, and the formulas of Megatron-LM's scheduler.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from equivalence.layouts import TINY, Layout, compare, saved_tensors, train
from equivalence.test_weight_averages import command, run
from megalite.config import parse
from megalite.errors import ConfigError
from megalite.testing import RanksFailed, run_ranks, run_single
from megalite.train.param_schedules import ParamSchedules

RATES = ("--decoupled-lr", "3e-2", "--decoupled-min-lr", "2e-3", "--lr-decay-style", "cosine", "--min-lr", "1e-3")
WARM = ("--lr-warmup", "iters=2", "init=1e-3", "--train-iters", "6")
UNTIED = "--untie-embeddings-and-output-weights"
LAYOUTS: dict[str, tuple[int, str, str]] = {  # ranks, model, layout
    "alone": (1, "", ""),
    "tp2 pp2 tied": (4, "", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1"),
    "zero1": (2, UNTIED, "--zero-stage 1 --ddp-bucket-size 3000"),
    "zero3": (2, UNTIED, "--zero-stage 3"),
    "2bw": (2, UNTIED, "--pipeline-schedule 2bw --pipeline-model-parallel-size 2"),
    "host": (2, UNTIED, "--tensor-model-parallel-size 2 --offload optimizer --optimizer-offload-fraction 0.5"),
    "rows": (1, UNTIED, "--offload embedding"),
    "muon": (2, f"--optimizer muon {UNTIED}", "--zero-stage 2"),
    "adafactor": (2, "--optimizer adafactor", "--zero-stage 1"),
}
SEEN = ("tp2 pp2 tied", "zero3", "rows")


@pytest.mark.parametrize(
    "name", [name if name in SEEN else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
)
def test_every_layout_steps_as_one_process(name: str) -> None:
    world, model, layout = LAYOUTS[name]
    layers = ("--num-layers", "2", *model.split(), *RATES, *WARM)
    compare(Layout(layers, (*layout.split(), "--micro-batch-size", "1"), world, delay=int(name == "2bw")), steps=4)


def test_the_rate_is_that_of_embedding_and_output_layer_alone() -> None:
    """Learned positions have the other, as there. The first step of the product with and without the flag."""
    model = [*TINY, "--micro-batch-size", "1", "--num-layers", "2", UNTIED]
    plain, own = (train([*model, *more], 1, 1).tensors for more in ((), ("--decoupled-lr", "2e-2")))
    assert "embedding.position_embeddings.weight" in plain
    moved = {name for name, value in plain.items() if "/" not in name and (value - own[name]).abs().max() > 1e-6}
    assert moved == {"embedding.word_embeddings.weight", "head.output.weight"}


def schedules(*more: str) -> ParamSchedules:
    return ParamSchedules.of(parse([*TINY, "--num-layers", "2", "--micro-batch-size", "1", *more], world_size=1), 1)


def test_its_course_is_that_of_the_other() -> None:
    both = schedules(*RATES, *WARM)
    assert both.decoupled is not None and both.learning_rate.warmup_samples == both.decoupled.warmup_samples > 0
    half = both.decoupled.warmup_samples // 2
    assert both.decoupled(half) == pytest.approx(1e-3 + (3e-2 - 1e-3) / 2)  # one start, as in Megatron-LM
    assert both.decoupled(both.decoupled.decay_samples + 1) == 2e-3
    low = schedules("--decoupled-lr", "3e-2", "--min-lr", "1e-4").decoupled
    assert low is not None and low.min_lr == 1e-4
    assert schedules().decoupled is None and "decoupled" not in schedules().to_meta()
    assert ParamSchedules.from_meta(both.to_meta(), "x") == both


TP2 = ("--tensor-model-parallel-size", "2")
CORRECTED = ("--pipeline-schedule", "2bw", "--staleness-correction", "predict", "--pipeline-model-parallel-size", "2")


@pytest.mark.parametrize(
    ("before", "after"), [((), TP2), pytest.param(CORRECTED, CORRECTED, marks=pytest.mark.landing)]
)
def test_a_resume_keeps_it(before: tuple[str, ...], after: tuple[str, ...], tmp_path: Path) -> None:
    """At another layout; and where weights are foreseen with the rate of the newest update."""
    model, save = ("--num-layers", "2", UNTIED, *RATES, *WARM), ("--save-interval", "2")
    world, half = 2 if before else 1, str(tmp_path / "half")
    run_ranks(run, world, command(tmp_path / "whole", *model, *before, *save, steps=4))
    run_ranks(run, world, command(tmp_path / "half", *model, *before, *save, "--exit-interval", "2", steps=4))
    run_ranks(run, 2, command(tmp_path / "half", *model, *after, *save, "--load", half, steps=4))
    whole, resumed = (saved_tensors(tmp_path / name) for name in ("whole", "half"))
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-11)


def test_another_rate_on_resume_needs_a_word(tmp_path: Path) -> None:
    folder, load = tmp_path / "run", ("--num-layers", "2", "--load", str(tmp_path / "run"))
    run_ranks(run, 1, command(folder, *load[:2], "--decoupled-lr", "3e-2", steps=1))
    for more, line in {
        ("--decoupled-lr", "2e-2"): "--decoupled-lr=0.02: the checkpoint's run has 0.03; --override-opt",
        (): "--decoupled-lr: the checkpoint's run has 0.03; --override-opt",
    }.items():
        with pytest.raises(RanksFailed, match=line):
            run_single(run, command(folder, *load, *more, steps=2))
    run_single(run, command(folder, *load, "--use-checkpoint-opt-param-scheduler", steps=2))


WRONG: dict[str, Any] = {
    "--decoupled-min-lr 1e-4": "--decoupled-min-lr=0.0001: needs --decoupled-lr",
    "--decoupled-lr 1e-4 --decoupled-min-lr 1e-3": "--decoupled-min-lr=0.001: above --decoupled-lr=0.0001",
    "--decoupled-lr 1e-5 --min-lr 1e-4": "--min-lr=0.0001: above --decoupled-lr=1e-05; give --decoupled-min-lr",
    "--decoupled-lr 0": "--decoupled-lr=0: must be > 0",
    "--decoupled-lr 1e-4 --lora rank=4": "--decoupled-lr=0.0001: not with --lora-rank",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_said(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([*TINY, "--micro-batch-size", "1", *words.split()], world_size=1)
    assert any(line.startswith(WRONG[words]) for line in caught.value.problems), caught.value.problems
