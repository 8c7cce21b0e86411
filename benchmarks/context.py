"""Context parallelism: a long sequence shared by the ranks, beside one process that has it whole, and torch's ring.

    python benchmarks/context.py                                  # two processes, s = 4,096: attention and a whole step
    python benchmarks/context.py --quick --check                  # compared with baseline.json

Every rank has one thread. `megalite-one` is the whole sequence in one process (all ranks run it at once, so that all
variants have the same memory bandwidth); `megalite-p2p`, `-all_gather` and `-a2a` share it. `floor` is what p2p
computes on the slowest rank with everything that would travel already there: an equal program without messages. `torch`
is torch's own ring attention with its zig-zag split (`torch.distributed.tensor.experimental`): its `context_parallel`
has no entry for the CPU's fused kernel, so its ring is given that kernel here, forward and backward.
Bars: p2p at least 1.75 times as fast as one process, and 1.15 times as fast as torch's ring.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks.harness import Benchmark, Flag, model_named
from benchmarks.turns import Case, Place, Variant

if TYPE_CHECKING:
    from torch import Tensor

ATTENTION = ("megalite-one", "megalite-p2p", "megalite-all_gather", "megalite-a2a", "floor", "torch")
STEP = ("megalite-one", "megalite-p2p", "megalite-all_gather", "megalite-a2a")
HEADS, CHANNELS, LAYERS = 6, 64, 2
FLAGS = {
    "length": Flag("tokens of the sequence", 4096, 4096),
    "ranks": Flag("processes", 2, 2),
}


def cases(args: argparse.Namespace) -> list[Case]:
    settings: dict[str, Any] = {"length": args.length}
    size = f"{args.length} tokens, {args.ranks} ranks, fp32"
    one, ring = ("megalite-p2p", "megalite-one"), ("megalite-p2p", "torch")
    common: dict[str, Any] = {"base": "megalite-one", "ranks": args.ranks}
    work = (float(args.length), "tokens")
    return [
        Case(f"attention, {size}", ATTENTION, (one, ring), settings, *work, **common),
        Case(f"step of a GPT, {size}", STEP, (one,), {**settings, "step": True}, *work, **common),
    ]


def build(name: str, case: Case, place: Place) -> Variant:
    if case.settings.get("step"):
        return step(name, case, place)
    if name == "torch":
        return torch_ring(case, place)
    return attention(name, case, place)


def step(name: str, case: Case, place: Place) -> Variant:
    """A training step of a GPT of `LAYERS` blocks: loss, gradients, their sum over the ranks, AdamW."""
    from benchmarks.megalite_step import Layout, TrainingStep, Update
    from benchmarks.plain_gpt import batch

    model = replace(model_named("small"), num_layers=LAYERS, seq_length=case.settings["length"])
    tokens, labels = batch(model, 1, place.device)
    kind = name.removeprefix("megalite-")
    layout = Layout() if kind == "one" else Layout(cp=place.ranks, cp_comm_type=kind)
    return TrainingStep(model, layout, Update(), Place() if kind == "one" else place, tokens, labels).variant()


def inputs(length: int, place: Place) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the result, `[s, b, heads, d]`, whole and the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(length, 1, HEADS, CHANNELS, generator=generator).to(place.device) for _ in range(4))


def attention(name: str, case: Case, place: Place) -> Variant:
    """Forward and backward of the core, of this rank's tokens."""
    import torch

    from megalite.comm import ParallelMesh
    from megalite.microbatch import Microbatch
    from megalite.nn import AttentionCore, context_attention
    from megalite.parallel.context import SequenceCut

    still: AbstractContextManager[object] = nullcontext()
    s, kind = case.settings["length"], name.removeprefix("megalite-")
    whole, core = inputs(s, place), AttentionCore(product_dtype=torch.float32)
    ids = torch.zeros(1, s, dtype=torch.int64, device=place.device)
    batch = Microbatch(ids, ids, ids, ids, ids[0, :1])
    if kind == "one":
        leaves = [x.requires_grad_() for x in whole[:3]]
        return differentiated(lambda q, k, v: core(q[:, :, :, None], k, v, training=True), leaves, whole[3])
    if kind == "floor":
        ring = importlib.import_module("megalite.parallel.context.ring")
        kind, still = "p2p", patch.object(ring, "start_shift", Stays)
    traders = place.ranks if kind == "a2a" else 1
    mesh = ParallelMesh.build(rank=place.rank, size=place.ranks, cp=place.ranks, cp_heads=traders)
    axes = mesh.context(gathers=kind == "all_gather")
    core = replace(core, axes=axes)
    batch = SequenceCut(place.rank, place.ranks, axes.ring.size)(batch)
    own = batch.places
    leaves = [x[own].requires_grad_() for x in whole[:3]]

    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = context_attention(core, q[:, :, :, None], k, v, batch, None, training=True)
        return result

    return differentiated(shared, leaves, whole[3][own], still)


class Stays:
    """In place of a message: what is sent is what comes."""

    def __init__(self, x: Tensor, axis: object, *, gradient: bool = False) -> None:
        self.x = x

    def wait(self) -> Tensor:
        return self.x


def differentiated(
    attend: Callable[..., Tensor],
    leaves: list[Tensor],
    gradient: Tensor,
    within: AbstractContextManager[object] | None = None,
) -> Variant:
    """The gradients of q, k and v for that of the result."""
    import torch

    def run() -> None:
        with within or nullcontext():
            result = attend(*leaves)
            torch.autograd.grad(result, leaves, gradient.reshape(result.shape))

    return Variant(run)


def torch_ring(case: Case, place: Place) -> Variant:
    """torch's templates, which its entries for CUDA's kernels call, with the CPU's kernel."""
    import torch
    import torch.distributed as dist

    theirs: Any = importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")

    aten = torch.ops.aten

    def kernel(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> tuple[Tensor, ...]:
        return tuple(aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal))

    def gradient(*, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, **more: Tensor) -> tuple[Tensor, ...]:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        result = more["out"], more["logsumexp"]
        return tuple(backward(more["grad_out"], query, key, value, *result, 0.0, is_causal))

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor
            out, lse = theirs._templated_ring_attention(dist.group.WORLD, 2, kernel, q, k, v, is_causal=True)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            name = "grad_out"
            return theirs._templated_ring_attention_backward(
                dist.group.WORLD, 2, gradient, dy, name, *ctx.saved_tensors, is_causal=True
            )

    from megalite.parallel.context import sequence_order

    own = sequence_order(case.settings["length"], place.ranks).chunk(place.ranks)[place.rank]
    mine = [x[own].permute(1, 2, 0, 3).contiguous() for x in inputs(case.settings["length"], place)]
    return differentiated(Ring.apply, [x.requires_grad_() for x in mine[:3]], mine[3])


BENCHMARK = Benchmark("context", __doc__, FLAGS, cases, build, ATTENTION)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
