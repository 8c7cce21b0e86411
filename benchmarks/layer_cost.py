"""What one layer costs on a GPU: launches, waits of the host, bytes beside products, memory, by the real layer.

In eager mode every operation that is no view is a launch, and moves what it reads and writes. Products and attention by
the library's kernels are launches whose bytes are not counted: their time is that of their arithmetic. What the product
compiles there, flex attention, counts as one launch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from megalite.checkpoint import without_gc
from megalite.comm import ParallelMesh
from megalite.config import Config
from megalite.gradient import GradSink, attach_sink
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.parallel.expert import RowCounts
from megalite.parallel.tensor import LayerContext
from megalite.rehearsal import DEVICE, FakeGroups, Gpu, alone

BY_ARITHMETIC = ("mm", "addmm", "bmm", "attention", "_flash", "_efficient")
"""How the names of kernels begin or what they contain whose time is not that of memory."""
BLOCK = 128


class LayerCost(NamedTuple):
    """Of a micro-batch: launches forward and backward; waits of the host; bytes beside products; bytes on the device at
    most, beside weights and their gradients."""

    forward: int
    backward: int
    waits: int
    moved: int
    peak: int


def cost_of_layer(config: Config, index: int) -> LayerCost:
    """Of layer `index` of [embedding, block 0, ..., head], on the first rank of its tensor-parallel group."""
    tp = config.parallel.tensor_model_parallel_size
    flex = "megalite.nn.attention.masked._flex"
    with (
        alone(FakeGroups(0, tp)) as gpu,
        patch.object(RowCounts, "on_host", _balanced(config)),
        patch(flex, lambda: (compiled_attention, compiled_blocks)),
    ):
        run = _layer(config, index, tp)
        run()  # kernels are tried
        gc.collect()  # what is in circles is freed when Python comes to it, at another place each time
        before = gpu.ledger.allocated
        gpu.ledger.peak = before
        with _counted(gpu) as counts, without_gc():
            y = run()
            forward = counts["launches"]
            if y.requires_grad:
                y.backward(torch.ones_like(y) if y.dim() else None)
        waits, moved = counts["waits"], counts["moved"]
        assert gpu.races == [], gpu.races
        return LayerCost(forward, counts["launches"] - forward, waits, moved, gpu.ledger.peak - before)


class CompiledAttention(torch.autograd.Function):
    """In the place of compiled flex attention, a launch forward and one backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, key, value)
        return a_product(query), query.new_empty(query.shape[:-1], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        query, key, value = ctx.saved_tensors
        return a_product(query), torch.empty_like(key), torch.empty_like(value)


def compiled_attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Any:
    """As `flex_attention`."""
    return CompiledAttention.apply(query, key, value)  # type: ignore[no-untyped-call]  # torch's has no type


def a_product(x: Tensor) -> Tensor:
    """A launch whose result is like x."""
    rows = x.reshape(-1, *x.shape[-2:])
    return torch.bmm(rows, rows.new_empty(len(rows), x.shape[-1], x.shape[-1])).view(x.shape)


def compiled_blocks(first: Tensor) -> tuple[Tensor, ...]:
    """In the place of a compiled mask's blocks, a launch."""
    b, n = len(first), -(-first.shape[1] // BLOCK)
    shapes = [(b, 1, n), (b, 1, n, n)] * 2
    return first.new_zeros(shapes[0], dtype=torch.int32), *(first.new_empty(x, dtype=torch.int32) for x in shapes[1:])


def _balanced(config: Config) -> tuple[int, ...]:
    """Rows of each expert, which no device without values knows."""
    experts, tokens = config.model.experts, config.training.micro_batch_size * config.model.seq_length
    number = experts.num_experts or 1
    return (tokens * experts.moe_router_topk // number,) * number


def _layer(config: Config, index: int, tp: int) -> Callable[[], Any]:
    """A function that runs a micro-batch through it."""
    mesh = ParallelMesh.build(rank=0, size=tp, tp=tp)
    context = LayerContext(
        tp=mesh["tp"],
        sharers=mesh.sharing_keys(config.model.query_groups),
        sequence_parallel=config.parallel.sequence_parallel,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    stack = build_stack(config.model, [layer_specs(config.model)[index]], context)
    for parameter in stack.parameters():
        attach_sink(parameter, GradSink(torch.zeros(parameter.shape, dtype=torch.float32, device=DEVICE)))
    b, s, h = config.training.micro_batch_size, config.model.seq_length, config.model.hidden_size
    places = torch.zeros(b, s, dtype=torch.int64, device=DEVICE)
    mask, ids = torch.ones(b, s, device=DEVICE), torch.zeros(b, dtype=torch.int64, device=DEVICE)
    batch = Microbatch(places, places, places, mask, ids, share=torch.ones((), device=DEVICE))
    rows = s // (tp if config.parallel.sequence_parallel else 1)
    x = torch.zeros(rows, b, h, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    return lambda: stack(x, batch)


@contextmanager
def _counted(gpu: Gpu) -> Iterator[dict[str, int]]:
    """Counts what streams are given."""
    found, work, synced = {"launches": 0, "waits": 0, "moved": 0}, gpu.ledger.work, gpu.ledger.synced

    def counting(line: Any, op: str, reads: Any, writes: Any) -> None:
        reads, writes = list(reads), list(writes)
        if line is not gpu.ledger.host:
            found["launches"] += 1
            if not any(op.startswith(word) or word in op for word in BY_ARITHMETIC):
                found["moved"] += sum(x.nbytes for x in (*reads, *writes))
        work(line, op, reads, writes)

    def waiting(why: str) -> None:
        found["waits"] += 1
        synced(why)

    with patch.object(gpu.ledger, "work", counting), patch.object(gpu.ledger, "synced", waiting):
        yield found
