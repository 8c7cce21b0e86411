"""Data parallelism: a training step of one GPT at each ZeRO stage, beside DDP, ZeroRedundancyOptimizer and FSDP2.

    python benchmarks/data.py                                     # two processes: time, then peak memory
    python benchmarks/data.py --ranks 8 --model gpt2 --memory no
    python benchmarks/data.py --quick --check                     # compared with baseline.json

`plain` is the plain model on every rank without any message: what all others are compared with. Stages 2 and 3 change
how the process gives memory back to the system, for all variants beside them too; they are measured in a launch of
their own. Peak memory: one launch a variant, on the fullest rank; what the process takes above its imports, and the
most that tensors hold at once (CPU).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks.harness import MODELS, Benchmark, Flag, model_named
from benchmarks.turns import Case, Place, Variant

STAGES = ("megalite-zero0", "megalite-zero1", "megalite-zero2", "megalite-zero3")
PEERS = ("plain", "ddp", "zero-redundancy", "fsdp2")
TIMED = {
    "": ("plain", "megalite-zero0", "megalite-zero1", "ddp", "zero-redundancy"),
    ", sharded": ("plain", "megalite-zero2", "megalite-zero3", "fsdp2"),
}
PAIRS = (
    ("megalite-zero0", "ddp"),
    ("megalite-zero1", "zero-redundancy"),
    ("megalite-zero2", "plain"),
    ("megalite-zero3", "fsdp2"),
)
FLAGS = {
    "model": Flag("GPT", "small", "small", MODELS),
    "batch_size": Flag("sequences of a rank", 4, 2),
    "ranks": Flag("processes", 2, 2),
    "matmul": Flag("--float32-matmul-precision", "medium", "medium", ("highest", "high", "medium")),
    "memory": Flag("measure peak memory too", "yes", "yes", ("no", "yes")),
    "memory_model": Flag("GPT whose memory is measured, one sequence a rank", "medium", "small", MODELS),
}


def cases(args: argparse.Namespace) -> list[Case]:
    model = model_named(args.model)
    settings = {"model": model, "batch_size": args.batch_size, "matmul": args.matmul}
    tokens = args.batch_size * model.seq_length * args.ranks
    name = f"{args.model}, {args.batch_size} sequences a rank, {args.ranks} ranks, fp32 {args.matmul}"
    found = [
        Case(f"{name}{title}", variants, within(variants), settings, tokens, "tokens", "plain", args.ranks)
        for title, variants in TIMED.items()
    ]
    if args.memory == "yes":
        settings = {"model": model_named(args.memory_model), "small_model": model_named("tiny"), "batch_size": 1}
        settings["matmul"] = args.matmul
        variants = ("plain", *STAGES, *PEERS[1:])
        name = f"memory of {args.memory_model}, 1 sequence a rank, {args.ranks} ranks"
        found.append(Case(name, variants, within(variants), settings, base="plain", ranks=args.ranks, memory=True))
    return found


def within(variants: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in PAIRS if set(pair) <= set(variants))


def build(name: str, case: Case, place: Place) -> Variant:
    from benchmarks.megalite_step import Layout, TrainingStep, Update
    from benchmarks.plain_gpt import PlainGPT, adamw, batch, plain_step

    model = case.settings["model"]
    tokens, labels = batch(model, case.settings["batch_size"], place.device, seed=place.rank)
    if name in STAGES:
        return TrainingStep(model, Layout(zero_stage=int(name[-1])), Update(), place, tokens, labels).variant()
    plain = PlainGPT(model).to(place.device)
    run, optimizer = (plain, adamw(plain.parameters())) if name == "plain" else sharded(name, plain, place)
    return Variant(plain_step(run, optimizer, tokens, labels))


def sharded(name: str, plain: Any, place: Place) -> tuple[Any, Any]:
    """The plain model and its optimizer under one of torch's own."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.plain_gpt import adamw

    if name == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(place.device.type, (place.ranks,))
        for block in plain.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(plain, mesh=mesh)
        return plain, adamw(plain.parameters())
    model = DistributedDataParallel(plain, static_graph=name == "ddp", gradient_as_bucket_view=True)
    if name == "ddp":
        return model, adamw(model.parameters())
    from torch.distributed.optim import ZeroRedundancyOptimizer

    settings: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.0, "fused": True}
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)


BENCHMARK = Benchmark("data", __doc__, FLAGS, cases, build, (*STAGES, *PEERS))

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
