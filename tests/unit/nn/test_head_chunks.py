"""Chunks of the loss on a GPU: long enough for the product that adds to the head's gradient, which goes into its sink
in one pass."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.counted_launches import MEMORY, PRODUCTS
from megalite.comm import Axis
from megalite.gradient import GradSink, WeightGradQueue, attach_sink
from megalite.inventory import chunk_length
from megalite.parallel.tensor import cross_entropy
from megalite.rehearsal import DEVICE, watched_gpu
from megalite.rehearsal.order import Ledger

V, H = 128_256, 4096


@pytest.mark.parametrize("tokens", [8192, 32768])
def test_a_product_of_a_chunk_is_not_slower_than_the_sum_that_it_reads_and_writes(tokens: int) -> None:
    step = chunk_length(tokens, V, on_cpu=False, compiled=True)
    assert 2 * step * V * H / PRODUCTS > 2 * 4 * V * H / MEMORY
    for compiled, bytes_of_a_logit in ((False, 10), (True, 4)):
        step = chunk_length(tokens, V, on_cpu=False, compiled=compiled)
        assert step % 128 == 0 and step * V * bytes_of_a_logit < 1.4e9


def head(device: Any, narrow: torch.dtype) -> tuple[list[Tensor], list[str]]:
    """(Losses of two micro-batches of seven tokens in chunks of three, and the gradient of the weight, in a sink of a
    dtype; what a GPU is given in their backward that writes something of the weight's size)."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.nn.Parameter(torch.randn(11, 6, generator=generator).to(device))
    attach_sink(weight, sink := GradSink(torch.full((11, 6), 7.0, dtype=narrow).to(device)))
    shard, queue, losses, ops = cross_entropy.VocabShard(Axis.single("tp"), 0, 11), WeightGradQueue(), [], list[str]()
    work = Ledger.work

    def noting(ledger: Ledger, line: Any, op: str, reads: Any, writes: Any, *more: Any, **named: Any) -> None:
        writes = list(writes)
        if any(x.nbytes in (weight.nbytes, sink.buffer.nbytes) for x in writes):
            ops.append(op)
        work(ledger, line, op, reads, writes, *more, **named)

    for factor in (1.0, 3.0):
        x = torch.randn(7, 6, generator=generator).to(device).requires_grad_()
        labels = torch.randint(11, (7,), generator=generator).to(device)
        with patch.object(cross_entropy, "chunk_length", lambda *_, **more: 3):
            loss = cross_entropy.fused_cross_entropy(
                x, weight, labels, torch.ones_like(x[:, 0]), shard=shard, sequence_parallel=False, queue=queue
            )
        with patch.object(Ledger, "work", noting):
            (loss * factor).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach().cpu())
    return [*losses, sink.grad.cpu()], ops


@pytest.mark.parametrize(("narrow", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_gradient_of_the_head_goes_into_its_sink_in_one_pass(narrow: torch.dtype, close: float) -> None:
    with watched_gpu() as gpu:
        found, ops = head(DEVICE, narrow)
        assert gpu.races == []
    for one, other in zip(found, head("cpu", narrow)[0], strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(11, 6, generator=generator).requires_grad_()
    for factor in (1.0, 3.0):
        x, labels = torch.randn(7, 6, generator=generator), torch.randint(11, (7,), generator=generator)
        (factor * F.cross_entropy(x @ weight.t(), labels, reduction="sum")).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found[-1].float(), weight.grad, rtol=close, atol=5 * close)
    assert ops == (["mul", "addcmul_"] if narrow == torch.float32 else ["mul", "mul_", "add_"])
