"""Products in float8 over tensor-parallel ranks: scales are those of whole tensors, and losses those of one process.

On a CPU in fp64 and emulated; on devices in bf16, by their kernels: over NCCL where there is a GPU for each rank, else
over gloo on one GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence.layouts import TINY, assert_close, train_body
from gpu.devices import DEVICES, NUM_GPUS
from torch import Tensor

from megalite.comm import ParallelMesh
from megalite.comm.world import World
from megalite.config import Float8
from megalite.parallel.tensor.float8 import Float8Products
from megalite.testing import run_ranks
from megalite.testing.oracle import reference

TP2 = "--tensor-model-parallel-size 2"
CASES = {
    "tensorwise": ("format=hybrid", f"{TP2} --sequence-parallel"),
    "delayed": ("format=e4m3 recipe=delayed amax_history_len=2", f"{TP2} --sequence-parallel"),
    "rowwise": ("format=e4m3 recipe=rowwise", TP2),
    "replicas, ZeRO 3, gathers in float8": ("format=e4m3 param_gather", "--zero-stage 3"),
}
ANYWHERE = [pytest.param("cpu", marks=pytest.mark.full), *DEVICES[1:]]


def without_kernels(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 products before compute capability 8.9")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ANYWHERE)
def test_losses_over_ranks(name: str, device: str) -> None:
    without_kernels(device)
    kind, layout = CASES[name]
    model = [*TINY, "--num-layers", "2", "--fp8", *kind.split()]
    model += ["--micro-batch-size", "1"]
    expected = reference(tuple(word for word in model if word != "param_gather"), 3)
    precision = [] if device == "cpu" else ["--no-fp64", "--bf16"]
    if device == "cuda" and NUM_GPUS < 2:
        precision += ["--distributed-backend", "gloo"]
    argv = [*model, *precision, *layout.split(), "--device", device]
    for losses, _ in run_ranks(train_body, 2, argv, 3, device=device, timeout=300.0):
        assert_close(losses, expected.losses, 1e-10 if device == "cpu" else 2e-2, "loss")


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """x, a weight and dy: the rows of the second rank are a millionth of those of the first."""
    generator = torch.Generator().manual_seed(1)
    x, weight, dy = (torch.randn(64, 64, generator=generator) for _ in range(3))
    return torch.cat([x[:32], 1e-6 * x[32:]]).bfloat16(), weight.bfloat16(), dy.bfloat16()


def products_of(rows: slice, given: Float8, cuts: dict[str, Any], device: torch.device) -> list[Tensor]:
    """y, dx and dW of these rows."""
    x, weight, dy = (each.to(device) for each in operands())
    products = Float8Products(given, cuts, torch.float32)
    y, kept = products.forward(x[rows], weight, None)
    products.begin_backward(dy[rows], weight, kept)
    dx = products.input_gradient(dy[rows], weight, kept)
    return [each.float().cpu() for each in (y, dx, products.weight_gradient(dy[rows], x[rows], weight, kept))]


def own_products(world: World, recipe: str, kind: str, agrees: bool) -> list[Tensor]:
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, tp=world.size)
    cuts = {"in": (), "out": (), "tokens": (mesh["tp"],) if agrees else ()}
    rows = slice(32 * world.rank, 32 * world.rank + 32)
    return products_of(rows, Float8(fp8_format=kind, fp8_recipe=recipe), cuts, world.device)


@pytest.mark.parametrize(("recipe", "kind"), [("tensorwise", "e4m3"), ("tensorwise", "hybrid"), ("rowwise", "e4m3")])
@pytest.mark.parametrize("device", DEVICES)
def test_scales_are_those_of_all_ranks(recipe: str, kind: str, device: str) -> None:
    """With a tensor's one scale small rows vanish; those of a rank by itself would not."""
    without_kernels(device)
    nothing = {"in": (), "out": (), "tokens": ()}
    whole = products_of(slice(0, 64), Float8(fp8_format=kind, fp8_recipe=recipe), nothing, torch.device("cpu"))
    found = run_ranks(own_products, 2, recipe, kind, True, device=device)
    alone = run_ranks(own_products, 2, recipe, kind, False, device=device)
    for rank, rows in enumerate((slice(0, 32), slice(32, 64))):
        for ours, theirs in zip(found[rank][:2], whole[:2], strict=True):
            most = max(float(theirs[rows].abs().max()), 1e-30)
            assert float((ours - theirs[rows]).abs().max()) < 1e-2 * most
    if recipe == "tensorwise":
        assert not found[1][0].any() and alone[1][0].all(), "the second rank's rows have a scale of their own"
    summed = found[0][2] + found[1][2]
    assert float((summed - whole[2]).abs().max()) < 1e-2 * float(whole[2].abs().max())
