"""Operands in float8, and what is asked of a GPU before it multiplies them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.counted_launches import Counting, Graphs
from megalite.config import parse
from megalite.errors import ConfigError
from megalite.microbatch_notes import Magnitudes
from megalite.parallel.tensor import check_float8, float8, float8_kernels
from megalite.parallel.tensor.delayed_scaling import DelayedProducts, ScaleTable
from megalite.parallel.tensor.float8 import E4M3, E5M2, Float8Products, product
from megalite.parallel.tensor.float8_kernels import Kernels, Operand, largest, rounded, scaled
from megalite.parallel.tensor.products import Products
from megalite.planner import float8_problems
from megalite.testing.float8 import PlainFloat8

FLAGS = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 1e-2 "
    "--train-iters 4 --mock-data --vocab-size 64 --bf16 --fp8-format hybrid"
).split()
RECIPES = ["tensorwise", "rowwise", "blockwise"]
ALL = [*RECIPES, "mxfp8"]


def operand(x: torch.Tensor, recipe: str, *, square: bool = False, dtype: torch.dtype = E4M3) -> torch.Tensor:
    scale = largest(x, recipe, square) / torch.finfo(dtype).max
    return Operand(rounded(x, scale, dtype), scale).widened()


def test_what_float8_can_say_it_says_exactly() -> None:
    x = torch.tensor([[448.0, -1.75, 0.0, 2**-9], [-448.0, 0.8125, 13.0, -(2.0**-6)]])
    for recipe in RECIPES[::2]:
        assert torch.equal(operand(x, recipe), x)
    assert torch.equal(operand(x * 128, "tensorwise", dtype=E5M2)[0, :2], x[0, :2] * 128)


@pytest.mark.parametrize("square", [False, True])
def test_one_large_number_spoils_what_shares_its_scale(square: bool) -> None:
    x = torch.full((200, 300), 1e-4)
    x[130, 5] = 1e4
    lost = {recipe: operand(x, recipe, square=square) == 0 for recipe in RECIPES}
    assert lost["tensorwise"].sum() == x.numel() - 1
    assert lost["rowwise"].sum() == 299 and bool(lost["rowwise"][130].sum() == 299)
    rows = slice(128, 200) if square else slice(130, 131)
    assert lost["blockwise"].sum() == lost["blockwise"][rows, :128].sum() == (72 if square else 1) * 128 - 1


def test_numbers_that_are_not_finite_stay_so() -> None:
    x = torch.ones(2, 4)
    x[1, 2] = torch.inf
    for recipe in RECIPES:
        assert not operand(x, recipe)[1, 2].isfinite()


UNCUT: dict[str, tuple[()]] = {"in": (), "out": (), "tokens": ()}


def three(products: Products | PlainFloat8, x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, kept = products.forward(x, weight, None)
    products.begin_backward(dy, weight, kept)
    return y, products.input_gradient(dy, weight, kept), products.weight_gradient(dy, x, weight, kept)


@pytest.mark.parametrize("recipe", ALL)
def test_products_are_near_those_of_bf16(recipe: str) -> None:
    given = parse([*FLAGS, "--fp8-recipe", recipe]).training.float8
    x, weight, dy = (torch.randn(48, 256), torch.randn(64, 256), torch.randn(48, 64))
    found = three(Float8Products(given, UNCUT, torch.float32), x, weight, dy)
    for ours, right in zip(found, (x @ weight.t(), dy @ weight, dy.t() @ x), strict=True):
        assert 0 < float((ours - right).norm() / right.norm()) < 0.1


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("keeps", [False, True])
def test_products_are_those_of_the_definition_whatever_is_kept(recipe: str, keeps: bool) -> None:
    """Sizes that no block divides; the weight changes between micro-batches, in its flat buffer, as an update does."""
    given = parse([*FLAGS, "--fp8-recipe", recipe]).training.float8
    products, plain = Float8Products(given, UNCUT, torch.float64, keeps=keeps), PlainFloat8(given)
    flat, rng = torch.zeros(72 * 200, dtype=torch.float64), torch.Generator().manual_seed(1)
    weight = flat.view(72, 200)
    for step in range(4):
        if step != 1:
            flat.copy_(torch.randn(72 * 200, generator=rng, dtype=torch.float64) ** 3)
        x, dy = (torch.randn(40, n, generator=rng, dtype=torch.float64) ** 3 for n in (200, 72))
        for ours, right in zip(three(products, x, weight, dy), three(plain, x, weight, dy), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_kept_weight_is_rounded_once_for_all_microbatches(recipe: str) -> None:
    given, seen = parse([*FLAGS, "--fp8-recipe", recipe]).training.float8, []
    products = Float8Products(given, UNCUT, torch.float32, keeps=True)
    weight = torch.randn(128, 256)

    def counting(function: Any) -> Any:
        def call(x: Tensor, *args: Any) -> Any:
            seen.append(tuple(x.shape))
            return function(x, *args)

        return call

    kernels = Kernels(rounded=counting(rounded), scaled=counting(scaled))
    with patch.object(float8_kernels, "kernels_on", lambda device_type: kernels):
        for _ in range(3):
            three(products, torch.randn(48, 256), weight, torch.randn(48, 128))
    assert seen.count((128, 256)) == 1
    assert seen.count((256, 128)) == (recipe == "rowwise")
    assert seen.count((48, 256)) == seen.count((256, 48)) == seen.count((48, 128)) == 3


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_every_scale_of_a_table_is_where_a_gpus_kernel_reads_one(wide: torch.dtype) -> None:
    """Seen on an H100: cuBLAS has no kernel for a scale at another address."""
    given = parse([*FLAGS, "--fp8-recipe", "delayed"]).training.float8
    table = ScaleTable([DelayedProducts(given, UNCUT, wide, magnitudes=Magnitudes(), device="cpu") for _ in range(3)])
    table.history.fill_(3.0)
    table.take_up()
    for scale in table.scales.flatten(0, 1):
        assert scale.data_ptr() % 16 == 0 and scale.shape == (1, 1)
    assert table.scales[2, 1].item() == pytest.approx(3 / 448)


@pytest.mark.landing
def test_delayed_scales_are_noted_in_the_pass_that_rounds() -> None:
    torch._dynamo.reset()
    given, graphs, magnitudes = parse([*FLAGS, "--fp8-recipe", "delayed"]).training.float8, Graphs(), Magnitudes()
    kernels, size = Kernels.compiled(graphs), 256  # type: ignore[arg-type]  # a backend itself in place of its name
    products = DelayedProducts(given, UNCUT, torch.float32, magnitudes=magnitudes, device="cpu", keeps=True)
    table = ScaleTable([products])
    table.history.fill_(3.0)
    table.take_up()
    x, weight, dy = (torch.randn(size, size).bfloat16() for _ in range(3))
    y = torch.zeros(size, size).bfloat16()
    with patch.object(float8_kernels, "kernels_on", lambda device_type: kernels), magnitudes.of(0):
        three(products, x, weight, dy)
        graphs.counting = counting = Counting()
        with patch.object(float8, "product", lambda a, b, *more, **how: y), counting:
            three(products, x, weight, dy)
    assert counting.nbytes / (2 * size * size) < 6
    seen = magnitudes.take(lambda number: True, torch.zeros(1, 3))
    assert seen.tolist() == [[float(each.abs().max()) for each in (x, weight, dy)]]


@pytest.mark.landing
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_passes_move_ten_bytes_an_element_at_most(recipe: str) -> None:
    """Counted of inductor's own fusion: what it launches, and bytes that it reads and writes."""
    torch._dynamo.reset()
    given, graphs = parse([*FLAGS, "--fp8-recipe", recipe]).training.float8, Graphs()
    kernels, size = Kernels.compiled(graphs), 256  # type: ignore[arg-type]  # a backend itself in place of its name
    products = Float8Products(given, UNCUT, torch.float32, keeps=True)
    x, weight, dy = (torch.randn(size, size).bfloat16() for _ in range(3))
    y = torch.zeros(size, size).bfloat16()
    with patch.object(float8_kernels, "kernels_on", lambda device_type: kernels):
        first = three(products, x, weight, dy)
        graphs.counting = counting = Counting()
        with patch.object(float8, "product", lambda a, b, *more, **how: y), counting:
            three(products, x, weight, dy)
    assert counting.nbytes / (2 * size * size) < 10  # x and dy: the weight is kept
    assert counting.launches["fused"] <= 8
    eager = three(Float8Products(given, UNCUT, torch.float32), x, weight, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, eager, strict=True))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((), None),
        (("--no-bf16",), "`fp8_format`=hybrid: needs `bf16` on a GPU"),
        (("--seq-length", "24"), "tokens of a micro-batch on a rank = 24, but kernels of GPUs need a multiple of 16"),
        (("--fp8-recipe", "mxfp8"), "`fp8_recipe`=mxfp8: emulated on a CPU, not built for GPUs"),
        (("--ffn-hidden-size", "40"), "rows of fc1 on a rank (of `ffn_hidden_size`) = 40, but kernels of GPUs need"),
        (("--fp8-recipe", "blockwise"), "rank = 16, but kernels of GPUs need a multiple of 128; another `fp8_recipe`"),
    ],
)
def test_sizes_that_a_gpu_cannot_multiply_are_found_before(flags: tuple[str, ...], line: str | None) -> None:
    found = list(float8_problems(parse([*FLAGS, *flags])))
    assert found == [] if line is None else line in found[0]


def test_a_kernel_that_is_right_is_no_problem() -> None:
    config = parse(FLAGS)
    check_float8(config, torch.device("cpu"))
    with patch("megalite.parallel.tensor.float8._worst_difference", return_value=0.0):
        check_float8(config, torch.device("cuda"))


def test_a_kernel_that_is_wrong_or_missing_is_refused() -> None:
    config, place = parse(FLAGS), "megalite.parallel.tensor.float8._worst_difference"
    with patch(place, return_value=float("nan")), pytest.raises(ConfigError, match="products are wrong"):
        check_float8(config, torch.device("cuda"))
    with patch(place, side_effect=RuntimeError("no kernel\nat all")), pytest.raises(ConfigError, match="no kernel$"):
        check_float8(config, torch.device("cuda"))


def test_bias_is_added_before_the_result_is_rounded() -> None:
    one = torch.ones(1, 1)
    a = b = Operand(rounded(one, one, E4M3), one)
    assert float(product(a, b, torch.bfloat16, torch.tensor([2.0**-8]))) == 1.0
    assert float(product(a, b, torch.bfloat16, torch.tensor([3 * 2.0**-9]))) == 1 + 2.0**-7


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--no-bf16 --fp16", "--fp8-format=hybrid: not with --fp16, whose loss scale has no use for it; use --bf16"),
        (
            "--fp8-recipe blockwise --tensor-model-parallel-size 2 --ffn-hidden-size 384",
            "--fp8-recipe=blockwise: --tensor-model-parallel-size cuts the MLP width (--ffn-hidden-size), 384, not at "
            "multiples of 128; use rowwise",
        ),
        (
            "--fp8-recipe mxfp8 --tensor-model-parallel-size 2 --ffn-hidden-size 336",
            "--fp8-recipe=mxfp8: --tensor-model-parallel-size cuts the MLP width (--ffn-hidden-size), 336, not at "
            "multiples of 32; use rowwise",
        ),
    ],
)
def test_what_cannot_be_is_one_line(flags: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse([*FLAGS, *flags.split()], world_size=2)
    assert str(error.value) == line
