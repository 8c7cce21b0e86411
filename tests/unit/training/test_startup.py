"""The start-up table: bytes per parameter as published, and no torch needed to print it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from megalite.config import Config
from megalite.schedule import build, lower
from megalite.training.startup import MemoryEstimate, estimate_memory, format_table, in_units, start_up_table
from tests.unit.training.fake_trainer import tiny_config


def _config(*, training: dict[str, Any] | None = None, **parallel: Any) -> Config:
    config = tiny_config()
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, **(training or {})),
        parallel=dataclasses.replace(config.parallel, **parallel),
    )


def _estimate(config: Config, world_size: int, schedule: str = "1f1b", rank: int = 0) -> MemoryEstimate:
    p = config.parallel.pipeline_model_parallel_size
    program = lower(build(schedule, p, 4))
    cuts = [range(4 * stage // p, 4 * (stage + 1) // p) for stage in range(p)]
    return estimate_memory(config, world_size, program=program, cuts=cuts, rank=rank)


PARAMETERS = 1872 + (16 - 10) * 8  # without padding, and 6 rows of padding


@pytest.mark.parametrize(
    ("stage", "half", "full"), [(0, 18, 16), (1, 6 + 12 / 4, 8 + 8 / 4), (2, 2 + 16 / 4, 4 + 12 / 4), (3, 18 / 4, 4)]
)
def test_bytes_per_parameter_over_four_shards(stage: int, half: float, full: float) -> None:
    for training, expected in (({"bf16": True}, half), ({}, full)):
        memory = _estimate(_config(training=training, zero_stage=stage), world_size=4)
        assert memory.total - memory.activations == pytest.approx(expected * PARAMETERS)


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        ({"optimizer": "sgd"}, 4),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, 0),
        ({"optimizer": "lion", "exp_avg_dtype": "bf16"}, 2),
        ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 4),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25}, 6),
    ],
)
def test_bytes_of_optimizer_state(optimizer: dict[str, Any], state: float) -> None:
    config = tiny_config()
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **optimizer))
    assert _estimate(config, world_size=1).optimizer == pytest.approx(state * PARAMETERS)


def test_two_weight_versions_cost_one_more_compute_copy() -> None:
    config = _config(training={"bf16": True}, pipeline_model_parallel_size=2)
    flush, double_buffered = _estimate(config, 2), _estimate(config, 2, "2bw")
    assert double_buffered.weights == 2 * flush.weights
    assert double_buffered.gradients == flush.gradients


def test_full_recomputation_keeps_one_layer() -> None:
    config = _config()
    model = dataclasses.replace(config.model, num_layers=8, recompute_granularity="full", recompute_method="uniform")
    recomputed = dataclasses.replace(config, model=model)
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=8))
    kept, whole = (
        estimate_memory(c, 1, program=lower(build("1f1b", 1, 1)), cuts=[range(10)], rank=0) for c in (recomputed, plain)
    )
    assert kept.activations < whole.activations / 4


def test_the_table_says_what_will_run() -> None:
    config = _config(
        pipeline_model_parallel_size=2, zero_stage=1, pipeline_schedule="2bw", training={"global_batch_size": 24}
    )
    cuts = [range(2), range(2, 4)]
    text = format_table(start_up_table(config, 4, program=lower(build("2bw", 2, 4)), cuts=cuts))
    assert "pp2 x dp2, schedule 2bw, ZeRO stage 1, on 4 x cpu" in text
    assert "24 samples = 4 micro-batches of 3 on 2 replicas; 96 tokens per step" in text
    assert "1.87 k (1,872)" in text
    assert "Megatron's convention" in text


def test_units() -> None:
    assert [in_units(n, "B") for n in (0, 999, 1000, 1234567, 5e18)] == ["0 B", "999 B", "1 kB", "1.23 MB", "5e+03 PB"]
    assert in_units(12) == "12"


def test_no_torch_is_imported() -> None:
    code = "import sys, megalite.training.startup; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
