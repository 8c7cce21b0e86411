"""Operands in float8, and what is asked of a GPU before it multiplies them."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megalite.config import parse
from megalite.errors import ConfigError
from megalite.parallel.tensor import check_float8
from megalite.parallel.tensor.float8 import E4M3, E5M2, Float8Products, largest, product, rounded

FLAGS = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 1e-2 "
    "--train-iters 4 --mock-data --vocab-size 64 --bf16 --fp8-format hybrid"
).split()
RECIPES = ["tensorwise", "rowwise", "blockwise"]


def operand(x: torch.Tensor, recipe: str, *, square: bool = False, dtype: torch.dtype = E4M3) -> torch.Tensor:
    scale = largest(x, recipe, square=square) / torch.finfo(dtype).max
    return rounded(x, scale, dtype).widened()


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


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_near_those_of_bf16(recipe: str) -> None:
    given = parse([*FLAGS, "--fp8-recipe", recipe]).training.float8
    x, weight, dy = (torch.randn(48, 256), torch.randn(64, 256), torch.randn(48, 64))
    products = Float8Products(given, {"in": (), "out": (), "tokens": ()}, torch.float32)
    y, kept = products.forward(x, weight, None)
    found = y, products.input_gradient(dy, weight, kept), products.weight_gradient(dy, x, weight, kept)
    for ours, right in zip(found, (x @ weight.t(), dy @ weight, dy.t() @ x), strict=True):
        assert 0 < float((ours - right).norm() / right.norm()) < 0.1


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((), None),
        (("--no-bf16",), "--fp8-format=hybrid: needs --bf16 on a GPU"),
        (("--seq-length", "24"), "tokens of a micro-batch = 24 is no multiple of 16"),
        (("--fp8-recipe", "blockwise"), "tokens of a micro-batch = 16 is no multiple of 128"),
    ],
)
def test_a_gpu_is_asked_before(flags: tuple[str, ...], line: str | None) -> None:
    config = parse([*FLAGS, *flags])
    check_float8(config, torch.device("cpu"))
    with patch("megalite.parallel.tensor.float8._worst_difference", return_value=0.0):
        if line is None:
            check_float8(config, torch.device("cuda"))
        else:
            with pytest.raises(ConfigError, match=line):
                check_float8(config, torch.device("cuda"))


def test_a_kernel_that_is_wrong_or_missing_is_refused() -> None:
    config, place = parse(FLAGS), "megalite.parallel.tensor.float8._worst_difference"
    with patch(place, return_value=float("nan")), pytest.raises(ConfigError, match="products are wrong"):
        check_float8(config, torch.device("cuda"))
    with patch(place, side_effect=RuntimeError("no kernel\nat all")), pytest.raises(ConfigError, match="no kernel$"):
        check_float8(config, torch.device("cuda"))


def test_bias_is_added_before_the_result_is_rounded() -> None:
    a, b = (rounded(x, torch.ones(1, 1), E4M3) for x in (torch.ones(1, 1), torch.ones(1, 1)))
    assert float(product(a, b, torch.bfloat16, torch.tensor([2.0**-8]))) == 1.0
    assert float(product(a, b, torch.bfloat16, torch.tensor([3 * 2.0**-9]))) == 1 + 2.0**-7


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--no-bf16 --fp16", "--fp8-format=hybrid: not with --fp16, whose loss scale has no use for it; use --bf16"),
        (
            "--fp8-amax-history-len 16",
            "--fp8-amax-history-len=16: --fp8-recipe=tensorwise looks at the numbers themselves; drop it, or use "
            "--fp8-recipe=delayed",
        ),
        (
            "--fp8-recipe blockwise --tensor-model-parallel-size 2 --ffn-hidden-size 384",
            "--fp8-recipe=blockwise: --tensor-model-parallel-size cuts the MLP width (--ffn-hidden-size), 384, not at "
            "multiples of 128; use rowwise",
        ),
    ],
)
def test_what_cannot_be_is_one_line(flags: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse([*FLAGS, *flags.split()], world_size=2)
    assert str(error.value) == line
