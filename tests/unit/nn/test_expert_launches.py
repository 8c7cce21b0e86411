"""A sparse MLP on a device: as many kernels at any number of experts, and the host waits for none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megalite.config import Experts, ModelConfig
from megalite.microbatch import Microbatch
from megalite.nn.experts import MoE
from megalite.nn.router import largest
from megalite.parallel.expert import grouped
from megalite.parallel.tensor import LayerContext
from megalite.rehearsal import DEVICE, watched_gpu
from megalite.rehearsal.order import Ledger
from megalite.rehearsal.streams import Stream

S, B, H = 16, 2, 32


def sparse(number: int, device: Any, **given: Any) -> MoE:
    config = ModelConfig(
        model_type="llama", num_layers=1, hidden_size=H, num_attention_heads=2, seq_length=S, vocab_size=64,
        activation="swiglu", add_bias_linear=False,
        experts=Experts(num_experts=number, moe_ffn_hidden_size=24, moe_aux_loss_coeff=0.01, **given),
    )  # fmt: skip
    layer = MoE(config, 0, LayerContext(dtype=torch.bfloat16, device=device))
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        values = torch.randn(parameter.shape, generator=generator).mul_(0.3)
        parameter.data = values.to(parameter.dtype).to(device)
    return layer


def batch(device: Any) -> tuple[Tensor, Microbatch]:
    tokens, x = torch.zeros(B, S, dtype=torch.int64), torch.randn(S, B, H, generator=torch.Generator().manual_seed(1))
    share = torch.tensor(0.5)
    parts = (tokens, tokens, tokens, torch.ones(B, S), torch.arange(B), share)
    names = ("tokens", "labels", "positions", "loss_mask", "sample_ids", "share")
    return x.bfloat16().to(device), Microbatch(**{n: p.to(device) for n, p in zip(names, parts, strict=True)})


def run(layer: MoE, x: Tensor, microbatch: Microbatch) -> Tensor:
    for segment in layer.segments(microbatch):
        x = segment.run(x)
    return x


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Kernels that streams are given, and how often the host waits for one."""
    found, work, wait = {"kernels": 0, "waits": 0}, Ledger.work, Stream.synchronize

    def counting(ledger: Ledger, line: Any, *args: Any, **named: Any) -> None:
        found["kernels"] += line is not ledger.host
        work(ledger, line, *args, **named)

    def waiting(stream: Stream, *why: Any) -> None:
        found["waits"] += 1
        wait(stream, *why)

    with patch.object(Ledger, "work", counting), patch.object(Stream, "synchronize", waiting):
        yield found


@pytest.mark.parametrize(("number", "k"), [(4, 2), (16, 2), (128, 8)])
def test_launches_do_not_grow_with_the_experts_and_the_host_waits_for_none(number: int, k: int) -> None:
    with watched_gpu() as gpu:
        layer, (x, microbatch) = sparse(number, DEVICE, moe_router_topk=k), batch(DEVICE)
        run(layer, x, microbatch)  # tries the kernel
        with counted() as found:
            run(layer, x, microbatch)
        assert gpu.races == []
    assert found["kernels"] <= 40 and found["waits"] == 0, found


@pytest.mark.parametrize("given", [{}, {"moe_expert_capacity_factor": 0.5}, {"moe_router_topk": 1}], ids=str)
def test_one_kernel_for_all_experts_gives_what_one_by_one_gives(given: dict[str, Any]) -> None:
    def gradients(device: Any) -> list[Tensor]:
        layer, (x, microbatch) = sparse(6, device, **given), batch(device)
        x.requires_grad_()
        y = run(layer, x, microbatch)
        y.backward(torch.ones_like(y))
        found = [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
        return [torch.empty(g.shape, dtype=g.dtype).copy_(g) for g in found if g is not None]

    expected = gradients("cpu")
    with watched_gpu() as gpu, patch.object(grouped.F, "grouped_mm", wraps=grouped.F.grouped_mm) as kernel:
        results = gradients(DEVICE)
        assert gpu.races == []
    assert kernel.call_count >= 4
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=0.03, atol=0.03 * float(other.abs().max()))


def test_equal_scores_go_to_the_first_on_a_device_as_on_a_cpu() -> None:
    x = torch.randint(0, 3, (50, 12), generator=torch.Generator().manual_seed(0)).float()
    expected = largest(x, 5)
    with watched_gpu():
        found = largest(x.to(DEVICE), 5)
        assert torch.equal(found.cpu(), expected)
