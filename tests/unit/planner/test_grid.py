"""Grids in the planner: AxoNN's figure, sequence parallelism as a special case, seconds of a step."""

from __future__ import annotations

import pytest

from megalite.config import parse
from megalite.inventory import grid_exchanges, model_layers, moved_by_a_block
from megalite.planner import Roofline, load_hardware
from megalite.planner.cost import grid_seconds

BASE = (
    "--num-layers 2 --hidden-size 8192 --num-attention-heads 64 --seq-length 2048 --micro-batch-size 8 --lr 1e-4 "
    "--train-iters 1 --mock-data --vocab-size 51200 --bf16"
)


def test_four_dimensions_move_less_than_two() -> None:
    """AxoNN: h = 8192, 512 devices, 4 M tokens: (X, Y, Z, data) = (1, 2, 8, 32) against tp 8 x dp 64."""
    block = model_layers(parse(BASE.split()).model)[1]
    line, grid = (
        moved_by_a_block(block, shape, data, 4e6 / data, again=False)
        for shape, data in (((1, 8, 1), 64), ((1, 2, 8), 32))
    )
    assert line / grid == pytest.approx(2.3, abs=0.05)
    h, tokens = 8192, 4e6 / 64
    sums = 4 * 2 * 7 / 8 * tokens * h  # Megatron-LM's all-reduces of a block
    assert line == pytest.approx(sums + 2 * 63 / 64 * 12 * h * h / 8, rel=1e-3)  # biases and norms beside


def test_a_line_is_a_grid_of_one_row() -> None:
    """1 x t x 1 sends what sequence parallelism does: two gathers and two sums each way, two inputs once more."""
    block = model_layers(parse(BASE.split()).model)[1]
    found = sum(each.sent for each in grid_exchanges(block, (1, 8, 1), 1000) if each.numel == 1000 * 8192)
    assert found == 10 * 7 / 8 * 1000 * 8192


def test_a_step_is_priced_by_its_messages() -> None:
    hardware = load_hardware("h100")
    flags = f"{BASE} --tensor-model-parallel-size 8 --tensor-parallel-mode"
    config = parse(f"{flags} 3d".split(), world_size=8)
    block = model_layers(config.model)[1]
    forward, backward = grid_seconds(config, block, hardware)
    assert 0 < forward < backward
    found = Roofline(hardware).layers(config)[1]
    alone = Roofline(hardware).layers(parse(BASE.split(), world_size=1))[1]
    assert found.forward > alone.forward / 8 + forward * 0.99
    cubes = Roofline(hardware).layers(parse(f"{flags} 4d --tensor-parallel-grid 1 2 4".split(), world_size=8))[1]
    assert cubes.forward != found.forward
