"""`tools/plan.py --sweep`: what is read, how two levels of memory count, and what COMET found for a model of 1 T."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import Config
from megalite.config.cli import parse
from megalite.errors import ConfigError
from megalite.planner import Roofline, load_hardware, predict
from plan import main
from plan_sweep import Point, best_at, check_out, machine, parse_sweeps

SMALL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --global-batch-size 32 "
    "--vocab-size 8000 --bf16 --lr 1e-4 --train-iters 10 --mock-data --micro-batch-size 1"
)
TRILLION = (
    "--num-layers 128 --hidden-size 25600 --num-attention-heads 512 --kv-channels 50 --seq-length 2048 "
    "--global-batch-size 1024 --vocab-size 51200 --bf16 --lr 1e-4 --train-iters 10 --mock-data --micro-batch-size 1 "
    "--zero-stage 2"
)
A100 = load_hardware("a100-80gb")


def of(flags: str) -> Config:
    return parse(flags.split(), world_size=1, check_files=False)


def test_what_is_read() -> None:
    found = parse_sweeps(["hbm_gb=40:640:x2", "inter_gbps=12.5,50", "zero_stage=0,2"])
    assert found == {"hbm_gb": [40, 80, 160, 320, 640], "inter_gbps": [12.5, 50], "zero_stage": [0, 2]}


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["hbm_gb=40:80"], "write it like hbm_gb=40:640:x2"),
        (["hbm=40,80"], "names, each once, are hbm_gb"),
        (["hbm_gb=40", "hbm_gb=80"], "names, each once"),
        (["hbm_gb=-4"], "numbers that rise, above 0"),
        (["hbm_gb=4:8:x1"], "times a factor above 1"),
        (["micro_batch_size=1.5"], "whole ones of a layout"),
        (["expanded_gb=80"], "--sweep=expanded_gb: at what bandwidth? Add --sweep expanded_gbps=500"),
        (["hbm_gb=1:1e9:x1.01", "zero_stage=0,1"], "searches; at most 400"),
        (["hbm_gb=nan"], "numbers that rise"),
    ],
)
def test_bad_sweeps_in_one_line(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_sweeps(texts)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_bad_files() -> None:
    with pytest.raises(ConfigError, match=r"names ending in \.csv or \.svg"):
        check_out("sweep.txt")


def test_the_cluster_of_a_point() -> None:
    found = machine(A100, {"hbm_gb": 40, "hbm_gbps": 1000, "intra_gbps": 100, "inter_gbps": 5, "bf16_tflops": 50})
    assert (found.memory_bytes, found.memory_bandwidth) == (40e9, 1e12)
    assert (found.intra_node.bandwidth, found.inter_node.bandwidth) == (100e9, 5e9)
    assert found.matrix_flops["bf16"] == 50e12 and found.matrix_flops["fp32"] == A100.matrix_flops["fp32"]


def test_what_lies_in_the_expansion_comes_at_its_bandwidth() -> None:
    """1 / BW = x / BW of the device + (1 - x) / BW of the expansion, of the answer's own footprint."""
    config, values = of(f"{SMALL} --zero-stage 0"), {"hbm_gb": 4.35, "expanded_gb": 40.0, "expanded_gbps": 100.0}
    given = frozenset({"zero_stage", "micro_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"})
    point = best_at(config, 2, A100, values, given, False)
    assert point.found is not None and 0 < point.expanded < 1
    here = 0.35e9 / point.found.memory_bytes  # without what is reserved
    assert point.expanded == pytest.approx(1 - here)
    speed = 1 / (here / A100.memory_bandwidth + (1 - here) / 100e9)
    slow = replace(A100, memory_bytes=44.35e9, memory_bandwidth=speed)
    expected = predict(point.found.config, 2, slow, Roofline(slow), plan=point.found.plan)
    assert point.found.step_time == pytest.approx(expected.step_time, rel=1e-12)


def test_more_memory_favours_less_tensor_parallelism() -> None:
    """COMET's study of Transformer-1T on 1,024 devices: MP64_DP16 is the first that fits, MP8_DP128 the best with an
    expansion, by 1.2 to 1.7 x; the slowest of both takes 5 to 10 x as long."""
    config, given = of(TRILLION), frozenset({"zero_stage", "pipeline_model_parallel_size"})

    def at(tp: int, more: float) -> Point:
        values = {"expanded_gbps": 500.0, "expanded_gb": more, "tensor_model_parallel_size": float(tp)}
        return best_at(config, 1024, A100, values, given, False)

    assert at(32, 0).found is None
    lean, best, worst = (at(*point).found for point in ((64, 0), (8, 480), (512, 0)))
    assert lean is not None and best is not None and worst is not None
    assert 1.2 < lean.step_time / best.step_time < 1.7
    assert 5 < worst.step_time / best.step_time < 10


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep.csv"
    flags = f"{SMALL} --num-devices 4 --hardware a100-80gb --sweep hbm_gb=5,80 --sweep inter_gbps=1:4:x4 --out {out}"
    assert main(flags.split()) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    rows = list(csv.DictReader(out.open()))
    assert [(row["hbm_gb"], row["inter_gbps"]) for row in rows] == [
        ("5.0", "1.0"),
        ("5.0", "4.0"),
        ("80.0", "1.0"),
        ("80.0", "4.0"),
    ]
    assert all(0 < float(row["footprint_gib"]) <= float(row["hbm_gb"]) for row in rows)
    assert main([*flags.split(), "--json"]) == 2
