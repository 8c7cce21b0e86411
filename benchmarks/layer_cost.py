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

from megalite.checkpoint import without_gc
from megalite.comm import ParallelMesh
from megalite.config import Config
from megalite.gradient import GradSink, attach_sink
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn import BlockGraphs
from megalite.parallel.expert import RowCounts
from megalite.parallel.tensor import LayerContext
from megalite.rehearsal import DEVICE, FakeGroups, Gpu, alone

BY_ARITHMETIC = ("mm", "addmm", "bmm", "attention", "_flash", "_efficient")
"""How the names of kernels begin or what they contain whose time is not that of memory."""

UNTIL_CAPTURED = 3
"""Micro-batches, beside the first one, after which blocks run by CUDA graphs."""


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
    with (
        alone(FakeGroups(0, tp)) as gpu,
        patch.object(RowCounts, "on_host", _balanced(config)),
    ):
        run, _, x = layer_of(config, index, ParallelMesh.build(rank=0, size=tp, tp=tp), DEVICE)
        run()  # kernels are tried
        gc.collect()  # what is in circles is freed when Python comes to it, at another place each time
        before = gpu.ledger.allocated
        if config.parallel.hardware.cuda_graph_impl != "none":
            for _ in range(UNTIL_CAPTURED):
                run().sum().backward()
            x.grad = None
        gpu.ledger.peak = gpu.ledger.allocated
        with counted(gpu) as counts, without_gc():
            y = run()
            forward = counts["launches"]
            if y.requires_grad:
                y.backward(torch.ones_like(y) if y.dim() else None)
        waits, moved = counts["waits"], counts["moved"]
        assert gpu.races == [], gpu.races
        return LayerCost(forward, counts["launches"] - forward, waits, moved, gpu.ledger.peak - before)


def _balanced(config: Config) -> tuple[int, ...]:
    """Rows of each expert, which no device without values knows."""
    experts, tokens = config.model.experts, config.training.micro_batch_size * config.model.seq_length
    number = experts.num_experts or 1
    return (tokens * experts.moe_router_topk // number,) * number


def layer_of(
    config: Config, index: int, mesh: ParallelMesh, device: torch.device | str, *, compiled: bool = False
) -> tuple[Callable[[], Any], list[torch.nn.Parameter], torch.Tensor]:
    """A function that runs a micro-batch of `config` through layer `index`, as the first of the mesh's ranks, its
    weights, whose values the caller draws where any are needed, and its input."""
    context = LayerContext(
        tp=mesh["tp"],
        sharers=mesh.sharing_keys(config.model.query_groups),
        sequence_parallel=config.parallel.sequence_parallel,
        dtype=torch.bfloat16,
        device=device,
    )
    stack = build_stack(config.model, [layer_specs(config.model)[index]], context)
    for parameter in stack.parameters():
        attach_sink(parameter, GradSink(torch.zeros(parameter.shape, dtype=torch.float32, device=device)))
    if compiled:
        stack.compile_blocks(on_device=True)
    b, s, h = config.training.micro_batch_size, config.model.seq_length, config.model.hidden_size
    places = torch.zeros(b, s, dtype=torch.int64, device=device)
    mask, ids = torch.ones(b, s, device=device), torch.zeros(b, dtype=torch.int64, device=device)
    batch = Microbatch(places, places, places, mask, ids, share=torch.ones((), device=device))
    rows = s // (mesh.size("tp") if config.parallel.sequence_parallel else 1)
    x = torch.zeros(rows, b, h, dtype=torch.bfloat16, device=device).requires_grad_()
    if config.parallel.hardware.cuda_graph_impl != "none":
        BlockGraphs(stack, context.weight_grads)
    return lambda: stack(x, batch), list(stack.parameters()), x


@contextmanager
def counted(gpu: Gpu) -> Iterator[dict[str, int]]:
    """Counts what streams are given."""
    found, work, synced = {"launches": 0, "waits": 0, "moved": 0}, gpu.ledger.work, gpu.ledger.synced

    def counting(line: Any, op: str, reads: Any, writes: Any, *more: Any, **named: Any) -> None:
        reads, writes = list(reads), list(writes)
        if line is not gpu.ledger.host:
            found["launches"] += 1
            if not any(op.startswith(word) or word in op for word in BY_ARITHMETIC):
                found["moved"] += sum(x.nbytes for x in (*reads, *writes))
        work(line, op, reads, writes, *more, **named)

    def waiting(why: str) -> None:
        found["waits"] += 1
        synced(why)

    with patch.object(gpu.ledger, "work", counting), patch.object(gpu.ledger, "synced", waiting):
        yield found
