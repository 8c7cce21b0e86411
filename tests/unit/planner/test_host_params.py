"""What weights on the host cost: max(compute, transfer), and the room that a budget leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import Config, parse
from megalite.inventory import stage_layer_ranges
from megalite.planner import (
    Hardware,
    PlannedStages,
    Roofline,
    load_hardware,
    predict,
    program_of,
    startup_rows,
    within_budget,
)

FLAGS = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 --bf16 "
    "--global-batch-size 4 --lr 1e-4 --train-iters 10 --mock-data --vocab-size 8192 --zero-stage 2"
)


def config_of(more: str = "") -> Config:
    return parse([*FLAGS.split(), *more.split()], world_size=1, check_files=False)


def pipeline_seconds(hardware: Hardware, more: str = "") -> float:
    return predict(config_of(more), 1, hardware, Roofline(hardware)).breakdown["pipeline"]


def with_link(bandwidth: float) -> Hardware:
    return replace(load_hardware("a100-80gb"), host_link=bandwidth)


def test_a_fast_link_costs_the_first_layer_alone_and_a_slow_one_what_moves() -> None:
    """4 micro-batches: a forward fetches every layer but one, a backward all but the two that are there; beside it 4
    bytes a parameter go to the host, twice as long as what comes."""
    plain, flag = pipeline_seconds(with_link(1e15)), "--param-offload cpu"
    assert pipeline_seconds(with_link(1e15), flag) == pytest.approx(plain, rel=1e-6)
    parameters = 8 * 12 * 2048**2 + 8192 * 2048
    slow = 1e8
    gradients, weights = 4 * 4 * parameters / slow, 4 * 2 * parameters / slow
    assert pipeline_seconds(with_link(slow), flag) == pytest.approx(gradients + weights, rel=0.1)


def test_the_table_says_what_comes_and_how_much_is_there() -> None:
    configs = [config_of(f"--param-offload cpu {more}") for more in ("", "--device-memory-budget-gb 1.9")]
    free, bound = (within_budget(config, 1, on_cpu=False) for config in configs)
    rows = []
    for config, plan in zip(configs, (free, bound), strict=True):
        program = program_of(config, 1, plan)
        cuts = stage_layer_ranges(config, program)
        rows.append(dict(startup_rows(PlannedStages(config, 1, program, cuts, plan), "GPU")))
    assert free.chunks is not None and free.chunks.capacity is None
    assert "on the host, with gradients; at most 201 MB of 843 MB on a device" in rows[0]["weights"]
    assert bound.chunks is not None and bound.chunks.capacity is not None
    assert "budget" not in rows[0] and "weights, gradients, masters and moments: " in rows[1]["budget"]
    fewer = [int(row["weights"].split("for ")[1].split(" of")[0]) for row in rows]
    assert fewer[1] < fewer[0]
