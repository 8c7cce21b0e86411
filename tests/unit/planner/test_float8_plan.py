"""What the planner says of fp8: bytes of kept weights as a run has them, and the time of rounding."""

from __future__ import annotations

import pytest

from megalite.config import parse
from megalite.models import build_stack, layer_specs
from megalite.parallel.tensor import LayerContext
from megalite.parallel.tensor.float8 import Float8Products
from megalite.planner import PlannedStages, Roofline, load_hardware, predict
from megalite.planner.data_parallel import DataParallel
from megalite.planner.float8 import gathered_bytes, kept_bytes, rounded_elements

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-2 "
    "--train-iters 4 --mock-data --vocab-size 64 --fp8-format hybrid"
).split()
LLAMA_8B = (
    "--model-type llama --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--num-query-groups 8 --seq-length 8192 --micro-batch-size 1 --global-batch-size 64 --bf16 --lr 1e-4 "
    "--train-iters 10 --mock-data --vocab-size 128256 --zero-stage 1"
).split()


@pytest.mark.parametrize(
    "model",
    [
        (),
        ("--swiglu", "--num-query-groups", "2", "--normalization", "RMSNorm"),
        ("--num-experts", "4", "--moe-shared-expert-intermediate-size", "32"),
        ("--fp8-recipe", "rowwise"),
    ],
)
def test_kept_weights_take_what_the_plan_says(model: tuple[str, ...]) -> None:
    config = parse([*SMALL, *model])
    context = LayerContext(float8=config.training.float8, keeps_float8=config.keeps_float8)
    stack, found = build_stack(config.model, layer_specs(config.model), context, init_seed=1), 0
    for module in stack.modules():
        products = getattr(module, "products", None)
        if isinstance(products, Float8Products):
            for contracted in ("in", "out"):
                found += products._of_weight(module.weight.detach(), contracted).values.nbytes
    assert found == kept_bytes(config, range(4)) > 0


@pytest.mark.parametrize(("flags", "kept"), [((), True), (("--zero-stage", "3"), False)])
def test_weights_that_come_and_go_are_not_kept(flags: tuple[str, ...], kept: bool) -> None:
    assert parse([*SMALL, *flags]).keeps_float8 == kept


def test_the_plan_counts_the_passes_of_rounding() -> None:
    hardware = load_hardware("h100")
    times = {
        name: predict(parse([*LLAMA_8B, *flags], world_size=8), 8, hardware, Roofline(hardware)).step_time
        for name, flags in {"bf16": (), "fp8": ("--fp8-format", "hybrid")}.items()
    }
    rates = hardware.matrix_flops
    assert 1.0 < times["bf16"] / times["fp8"] < rates["fp8"] / rates["bf16"]
    unknown = load_hardware("a100-80gb")
    same = [
        predict(parse([*LLAMA_8B, *flags], world_size=8), 8, unknown, Roofline(unknown)).step_time
        for flags in ((), ("--fp8-format", "hybrid"))
    ]
    assert same[0] == same[1]


def test_gathers_in_float8_take_half_the_time_and_a_slice_more() -> None:
    hardware = load_hardware("h100")
    plain, rounded = (
        parse([*LLAMA_8B, "--zero-stage", "3", "--fp8-format", "hybrid", *more], world_size=64)
        for more in ((), ("--fp8-param-gather",))
    )
    runs = [PlannedStages.of(config, 64, on_cpu=False) for config in (plain, rounded)]
    gathers = [DataParallel(run, hardware).of_pass(0).gather for run in runs]
    # the word embedding and the head, 1 of 8 billion, travel as they are, and a message takes its time at any length
    assert 0.5 < gathers[1] / gathers[0] < 0.7
    layer = rounded_elements(rounded, range(1, 2))
    assert layer == 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert gathered_bytes(rounded, range(34), 64) == 32 * layer // 64 + layer
