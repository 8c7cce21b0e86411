"""Weights and gradients that live on the host change where numbers are, not the numbers."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from equivalence.layouts import TINY, saved_tensors, train
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.errors import ConfigError
from megalite.inventory import computations, stage_layer_ranges
from megalite.planner import (
    PlannedStages,
    rank_memory,
    within_budget,
)
from megalite.testing import run_ranks
from megalite.train.run import open_run, run_training

PP2 = "--pipeline-model-parallel-size 2"
ROPE = "--position-embedding-type rope"
CASES = {
    "one rank, bf16": ("--bf16", 1),
    "stage 0": ("--zero-stage 0 --ddp-bucket-size 3000", 2),
    "stage 1": ("--bf16 --zero-stage 1 --ddp-bucket-size 3000", 2),
    "stage 1, one bucket": ("--zero-stage 1 --no-overlap-grad-reduce", 2),
    "stage 2": ("--zero-stage 2", 2),
    "stage 3": ("--bf16 --zero-stage 3", 2),
    "stage 3, one rank": ("--zero-stage 3", 1),
    "pp, tied": (f"{PP2} --no-untie-embeddings-and-output-weights", 2),
    "interleaved": (f"{PP2} --virtual-pipeline-model-parallel-size 2 --zero-stage 2", 2),
    "zb-h1": (f"{PP2} --pipeline-schedule zb-h1 --swiglu", 2),
    "zb-h1, stage 2": (f"{PP2} --pipeline-schedule zb-h1 --zero-stage 2", 2),
    "zb-v": (f"{PP2} --pipeline-schedule zb-v", 2),
    "chimera": (f"{PP2} --pipeline-schedule chimera", 2),
    "breadth-first": (f"{PP2} --pipeline-schedule breadth-first --virtual-pipeline-model-parallel-size 2", 2),
    "shifted": (f"{PP2} --pipeline-schedule shifted-critical-path", 2),
    "tp": ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    "halves": ("--micro-batch-size 2 --tensor-model-parallel-size 2 --tp-comm-overlap", 2),
    "cp": ("--context-parallel-size 2 --zero-stage 1", 2),
    "experts": ("--num-experts 4 --expert-model-parallel-size 2 --zero-stage 3", 2),
    "recomputed in pairs": ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", 1),
    "recomputed": ("--recompute-granularity full --recompute-method uniform --model-type llama --zero-stage 3", 2),
    "half of the states": ("--zero-stage 2 --offload optimizer fraction=0.5 --bf16", 2),
    "adapters": ("--lora rank=3 alpha=5 --bf16", 1),
    "adapters, stage 3": (f"--lora rank=3 alpha=5 --zero-stage 3 {PP2}", 4),
    "fp8": ("--bf16 --fp8 format=hybrid", 1),
    "muon": ("--optimizer muon --zero-stage 3", 2),
    "soap": ("--optimizer soap --zero-stage 1", 2),
    "adafactor": (f"--optimizer adafactor --zero-stage 1 {ROPE}", 2),
    "sgd": ("--optimizer sgd --bf16 --zero-stage 2", 2),
    "lion": (f"--optimizer lion --bf16 {ROPE}", 1),
}
DEFAULT = ("pp, tied",)


def arguments(layout: str) -> list[str]:
    given = layout.split()
    base = [word for word in TINY if word != "--fp64" or "--bf16" not in given]
    size = [] if "--micro-batch-size" in given else ["--micro-batch-size", "1"]
    return [*base, "--num-layers", "4", *size, *given]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in DEFAULT)) for name in CASES]
)
def test_no_bit_changes(name: str) -> None:
    layout, ranks = CASES[name]
    argv = arguments(layout)
    here, away = train(argv, ranks, 3), train([*argv, "--offload", "params"], ranks, 3)
    assert here.losses == away.losses and here.norms == away.norms
    assert here.tensors.keys() == away.tensors.keys()
    assert all(torch.equal(here.tensors[key], away.tensors[key]) for key in here.tensors)


def whole_run(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


@pytest.mark.full
def test_a_run_is_resumed_in_another_place(tmp_path: Path) -> None:
    """Evaluations in between read layer by layer, and change nothing either."""
    argv = [*arguments("--bf16 --eval-interval 1 --num-layers 2"), "--data-cache-path", str(tmp_path / "cache")]
    argv[argv.index("--eval-iters") + 1], argv[argv.index("--train-iters") + 1] = "1", "4"
    host = ["--offload", "params"]
    for name, first, second in (("host", host, []), ("device", [], host), ("straight", [], [])):
        folder = ["--save", str(tmp_path / name), "--load", str(tmp_path / name), "--auto-resume"]
        half = ["--exit-interval", "2"] if name != "straight" else []
        run_ranks(whole_run, 1, [*argv, *folder, *first, *half])
        run_ranks(whole_run, 1, [*argv, *folder, *second])
    straight = saved_tensors(tmp_path / "straight")
    for name in ("host", "device"):
        found = saved_tensors(tmp_path / name)
        assert found.keys() == straight.keys()
        assert all(torch.equal(found[key], straight[key]) for key in straight), name


def held_body(world: World, argv: list[str]) -> tuple[int, float, float]:
    """(Most bytes of weights and gradients on the device, the plan's of weights, and with scratch) of a rank."""
    with open_run(parse(argv, world_size=world.size), world) as run:
        trainer, rank = run.trainer, run.trainer.mesh.coordinate("pp")
        for _ in range(2):
            trainer.train_step(drain=True)
        config, plan = trainer.config, run.state.model.plan
        program = computations(config, config.num_microbatches(world.size), plan=plan)
        cuts = stage_layer_ranges(config, program)
        memory = rank_memory(PlannedStages(config, world.size, program, cuts, plan, on_cpu=True), rank)
        (tier,) = {f.rank_memory.tier for fs in run.state.model.buffers.values() for f in fs}
        assert tier is not None and tier.now == 0, "something stays on the device behind the step"
        return tier.peak, memory.weights, memory.weights + memory.buffers


def layouts() -> Iterator[tuple[str, int]]:
    """Twenty random ones."""
    rng = random.Random(19)
    for _ in range(20):
        pp = rng.choice([1, 2, 2])
        schedule = rng.choice(["1f1b", "gpipe", "zb-h1", "interleaved"]) if pp == 2 else "1f1b"
        more = f"--pipeline-model-parallel-size {pp} --pipeline-schedule {schedule} --zero-stage {rng.randrange(4)}"
        more += " --virtual-pipeline-model-parallel-size 2" if schedule == "interleaved" else ""
        more += rng.choice(["", " --num-layers 6", " --recompute-granularity full --recompute-method uniform"])
        more += rng.choice(["", " --bf16", " --untie-embeddings-and-output-weights", " --swiglu"])
        yield more, pp * rng.choice([1, 2])


@pytest.mark.parametrize(("layout", "ranks"), [pytest.param(*each, marks=pytest.mark.full) for each in layouts()])
def test_a_rank_holds_no_more_than_planned(layout: str, ranks: int, tmp_path: Path) -> None:
    argv = [*arguments(layout), "--data-cache-path", str(tmp_path), "--offload", "params"]
    for peak, weights, planned in run_ranks(held_body, ranks, argv):
        assert weights < peak <= planned


def test_a_budget_moves_weights_where_nothing_else_is_enough(tmp_path: Path) -> None:
    argv = [*arguments("--bf16"), "--recompute-granularity", "none", "--data-cache-path", str(tmp_path)]
    with pytest.raises(ConfigError) as error:
        within_budget(parse([*argv, "--device-memory-budget-gb", "1e-6"], world_size=1), 1, on_cpu=True)
    enough = re.search(r"([\d.]+) ([kM])B are needed|come and go; ([\d.e+-]+) are", str(error.value))
    assert enough is not None, error.value
    least = float(enough[3]) if enough[3] else float(enough[1]) * {"k": 1e-6, "M": 1e-3}[enough[2]]
    for factor in (1.01, 1.2):
        under = [*argv, "--device-memory-budget-gb", str(factor * least)]
        plan = within_budget(parse(under, world_size=1), 1, on_cpu=True)
        assert plan.chunks is not None and plan.chunks.capacity is not None
        peak, weights, planned = run_ranks(held_body, 1, under)[0]
        assert weights < peak <= planned < 1e9 * factor * least
        assert weights <= plan.chunks.capacity[0]
    bound = train([word for word in under if "data-cache" not in word and word != str(tmp_path)], 1, 3)
    free = train(arguments("--bf16"), 1, 3)
    assert bound.losses == free.losses and bound.norms == free.norms
    assert all(torch.equal(free.tensors[key], bound.tensors[key]) for key in free.tensors)
