"""Tensor parallelism: a training step of one GPT over all ranks, beside DTensor and beside one process.

    python benchmarks/tensor.py                                   # two processes
    python benchmarks/tensor.py --ranks 4 --model medium
    python benchmarks/tensor.py --quick --check                   # compared with baseline.json

`megalite-one` and `plain-one` are the whole model on one rank (all ranks run it at once); `-sp` adds sequence
parallelism. The DTensor variants are the plain model under parallelize_module with a vocabulary-parallel loss.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks.harness import MODELS, Benchmark, Flag, model_named
from benchmarks.turns import Case, Place, Variant

if TYPE_CHECKING:
    from torch import Tensor

VARIANTS = ("plain-one", "megalite-one", "megalite-tp", "megalite-tp-sp", "dtensor", "dtensor-sp")
PAIRS = (
    ("megalite-tp", "megalite-one"),
    ("megalite-tp", "dtensor"),
    ("megalite-tp-sp", "dtensor-sp"),
)
FLAGS = {
    "model": Flag("GPT", "small", "small", MODELS),
    "batch_size": Flag("sequences", 8, 4),
    "ranks": Flag("processes", 2, 2),
    "matmul": Flag("--float32-matmul-precision", "medium", "medium", ("highest", "high", "medium")),
}


def cases(args: argparse.Namespace) -> list[Case]:
    model = model_named(args.model)
    settings = {"model": model, "batch_size": args.batch_size, "matmul": args.matmul}
    name = f"{args.model}, {args.batch_size} sequences, {args.ranks} ranks, fp32 {args.matmul}"
    tokens = args.batch_size * model.seq_length
    return [Case(name, VARIANTS, PAIRS, settings, tokens, "tokens", base="megalite-one", ranks=args.ranks)]


def build(name: str, case: Case, place: Place) -> Variant:
    from benchmarks.megalite_step import Layout, TrainingStep, Update
    from benchmarks.plain_gpt import PlainGPT, adamw, batch, plain_step

    model = case.settings["model"]
    tokens, labels = batch(model, case.settings["batch_size"], place.device)
    if name == "megalite-one":
        return TrainingStep(model, Layout(), Update(), Place(), tokens, labels).variant()
    if name.startswith("megalite"):
        layout = Layout(tp=place.ranks, sequence_parallel=name.endswith("sp"))
        return TrainingStep(model, layout, Update(), place, tokens, labels).variant()
    plain = PlainGPT(model, apart=name != "plain-one").to(place.device)
    if name == "plain-one":
        return Variant(plain_step(plain, adamw(plain.parameters()), tokens, labels))
    return dtensor_step(plain, place, tokens, labels, sequence_parallel=name.endswith("sp"))


def dtensor_step(plain: Any, place: Place, tokens: Tensor, labels: Tensor, *, sequence_parallel: bool) -> Variant:
    """The plain model under torch's tensor parallelism, logits sharded over the vocabulary."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    from benchmarks.plain_gpt import adamw, plain_step

    mesh = init_device_mesh(place.device.type, (place.ranks,))
    along: dict[str, Any] = {"output_layouts": Shard(1)} if sequence_parallel else {}
    for block in plain.blocks:
        plan: dict[str, Any] = {f"attention.{letter}": tp.ColwiseParallel() for letter in "qkv"}
        plan |= {"attention.proj": tp.RowwiseParallel(**along), "down": tp.RowwiseParallel(**along)}
        plan["up"] = tp.ColwiseParallel()
        if sequence_parallel:
            gather = tp.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan |= {"norm_1": tp.SequenceParallel(), "norm_2": tp.SequenceParallel(), "attention": gather}
            plan["up"] = tp.ColwiseParallel(input_layouts=Shard(1))
        tp.parallelize_module(block, mesh, plan)
    if sequence_parallel:
        cut = tp.PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
        tp.parallelize_module(plain, mesh, {"blocks.0": cut, "norm": tp.SequenceParallel()})
    whole = Shard(1) if sequence_parallel else Replicate()
    head = tp.ColwiseParallel(input_layouts=whole, output_layouts=Shard(-1), use_local_output=False)
    tp.parallelize_module(plain, mesh, {"head": head})
    sharded = [p for p in plain.parameters() if isinstance(p, DTensor)]
    others = [p for p in plain.parameters() if not isinstance(p, DTensor)]  # no group of the fused kernel mixes them
    optimizer = adamw([{"params": sharded}, {"params": others}])
    step = plain_step(plain, optimizer, tokens, labels)

    def run() -> None:
        with tp.loss_parallel():
            step()

    return Variant(run)


BENCHMARK = Benchmark("tensor", __doc__, FLAGS, cases, build, VARIANTS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
