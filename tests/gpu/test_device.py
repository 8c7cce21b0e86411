"""One device: no host read in a step, offloading beside computation, products of padded vocabularies, the loss."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import OPTIMIZERS, TINY
from gpu.devices import DEVICES, needs_cuda
from torch import Tensor, nn

from megalite.comm import DeviceWaitClock
from megalite.comm.mesh import Axis
from megalite.comm.world import World
from megalite.config import Float8
from megalite.config.cli import parse
from megalite.gradient import GradSink, WeightGradQueue
from megalite.parallel.tensor import LossKernels, VocabShard, fused_cross_entropy
from megalite.parallel.tensor.float8 import _worst_difference as float8_difference
from megalite.parallel.tiers import ActivationOffload, Mover, SavedTensors
from megalite.testing import run_single
from megalite.train.run import open_run

PAGE = Path(__file__).parents[2] / "docs" / "gpus.md"
MAY_WAIT = PAGE.read_text().split("## When the host waits")[1].split("\n## ")[0].lower()


def body_without_reads(world: World, argv: list[str]) -> int:
    """torch itself raises where the host waits for the device in the middle of a log interval."""
    config = parse(argv, world_size=1)
    with open_run(config, world) as run:
        for step in range(5):
            mode = "error" if 1 <= step < 4 and world.device.type == "cuda" else "default"
            torch.cuda.set_sync_debug_mode(mode)
            run.trainer.train_step(drain=step == 4)
            torch.cuda.set_sync_debug_mode("default")
        run.trainer.updater.resolve_pending()
        return run.trainer.iteration


@needs_cuda
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if f"{name}'s" not in MAY_WAIT])
@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_the_host_never_waits_between_log_lines(optimizer: str, precision: str) -> None:
    argv = [*TINY, "--num-layers", "2", "--micro-batch-size", "1", "--no-fp64", precision, "--device", "cuda"]
    assert run_single(body_without_reads, [*argv, *OPTIMIZERS[optimizer].split()], device="cuda") == 5


def losses(vocabulary: int, device: str, kernels: LossKernels | None, dtype: torch.dtype, tokens: int, h: int) -> Any:
    """A call of the loss and its gradients."""
    padded = -(-vocabulary // 128) * 128
    torch.manual_seed(0)
    x = torch.randn(tokens, h, device=device, dtype=dtype).requires_grad_()
    weight = (0.05 * torch.randn(padded, h, device=device)).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=device)
    mask = torch.rand(tokens, device=device)
    shard = VocabShard(Axis.single("tp"), 0, vocabulary, kernels)

    def call() -> tuple[Tensor, ...]:
        total = fused_cross_entropy(
            x, weight, labels, mask, shard=shard, sequence_parallel=False, queue=WeightGradQueue()
        )
        return (total.detach(), *torch.autograd.grad(total, (x, weight)))

    return call


def milliseconds(call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    return 100 * (time.perf_counter() - began)


@needs_cuda
def test_a_vocabulary_of_odd_size_is_as_fast() -> None:
    """50,257 rows are padded to 50,304 and multiplied with them: no product begins at an odd address."""
    odd, even = (milliseconds(losses(size, "cuda", None, torch.bfloat16, 8192, 1024)) for size in (50257, 50304))
    assert odd < 1.1 * even


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [256, 201])
def test_the_loss_in_two_kernels_is_the_loss(device: str, vocabulary: int) -> None:
    from megalite.parallel.tensor import loss_kernels

    plain = LossKernels(loss_kernels.statistics, loss_kernels.gradient)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        expected = losses(vocabulary, device, None, dtype, 64, 32)()
        found = losses(vocabulary, device, plain, dtype, 64, 32)()
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        assert not found[2][vocabulary:].any(), "padding has no gradient"


@needs_cuda
def test_the_loss_compiled_is_the_loss() -> None:
    expected = losses(50257, "cuda", None, torch.bfloat16, 1024, 256)()
    found = losses(50257, "cuda", LossKernels.compiled(), torch.bfloat16, 1024, 256)()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@needs_cuda
def test_weight_gradients_are_added_unrounded() -> None:
    a, b = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    sink = GradSink(torch.zeros(256, 256, device="cuda"))
    for _ in range(2):
        sink.addmm(a, b)
    torch.testing.assert_close(sink.grad, 2 * (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-3)


class Attend(nn.Module):
    """Causal attention of 16 heads to itself, `[s, h]` -> `[s, h]`."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (16, -1)).transpose(0, 1)[None]
        y = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return y[0].transpose(0, 1).flatten(1)


@needs_cuda
def test_offloaded_activations_travel_behind_computation() -> None:
    """Of a long sequence: a layer that computes for less than its activations travel would wait for them."""

    def layers() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList(nn.Sequential(nn.Linear(2048, 2048), Attend()) for _ in range(4)).cuda().bfloat16()

    plain, offloaded = layers(), layers()
    ActivationOffload(list(offloaded), SavedTensors(Mover(torch.device("cuda"))))
    x = torch.randn(32768, 2048, device="cuda", dtype=torch.bfloat16)

    def step(stack: nn.ModuleList) -> None:
        y = x
        for layer in stack:
            y = layer(y)
        y.sum().backward()

    assert milliseconds(lambda: step(offloaded)) < 1.3 * milliseconds(lambda: step(plain))
    for ours, theirs in zip(offloaded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-2, atol=2e-2 * float(theirs.grad.abs().max()))


@needs_cuda
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("kind", ["e4m3", "hybrid"])
def test_float8_products_are_those_of_the_emulation(kind: str, recipe: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 products before compute capability 8.9")
    given = Float8(fp8_format=kind, fp8_recipe=recipe)
    try:
        assert float8_difference(given, torch.device("cuda")) < 1e-2
    except RuntimeError as error:  # a run refuses the recipe with this text
        pytest.skip(f"this torch on this GPU: {str(error).splitlines()[0]}")


@needs_cuda
def test_waits_of_the_device_are_timed_and_nobody_waits_for_the_clock() -> None:
    clock, other, computing = DeviceWaitClock(), torch.cuda.Stream(), torch.cuda.current_stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)  # some 0.1 s
        arrived = other.record_event()
    began = time.perf_counter()
    with clock:
        computing.wait_event(arrived)
    early = clock.take()
    assert time.perf_counter() - began < 0.05 and early == 0.0
    torch.cuda.synchronize()
    assert 0.03 < clock.take() < 1.0
