"""Pipeline schedules: the time of one batch of a GPT over all ranks, beside those of torch.distributed.pipelining.

    python benchmarks/pipeline.py                                 # two processes; 2, 4 and 8 micro-batches
    python benchmarks/pipeline.py --ranks 4 --num-microbatches 8 --variants megalite-2bw torch-1f1b
    python benchmarks/pipeline.py --quick --check                 # compared with baseline.json

All train the same GPT on the same batch, cut into equal stages, without clipping. `ideal` is the whole plain model on
every rank at once, without a message, divided by the number of ranks: a pipeline without bubbles and messages. An
asynchronous schedule runs several batches in a call, without draining between them, and is divided by their number.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks.harness import MODELS, Benchmark, Flag, model_named
from benchmarks.turns import Case, Place, Variant
from megalite.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

SCHEDULES = ("2bw", "1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
OURS = tuple(f"megalite-{name}" for name in SCHEDULES)
TORCH = ("gpipe", "1f1b", "interleaved", "interleaved-zb", "zb-v")
VARIANTS = ("ideal", *OURS, *(f"torch-{name}" for name in TORCH))
PAIRS = (
    ("megalite-2bw", "torch-1f1b"),
    ("megalite-1f1b", "torch-1f1b"),
    ("megalite-gpipe", "torch-gpipe"),
    ("megalite-interleaved", "torch-interleaved"),
    ("megalite-zb-v", "torch-zb-v"),
)
BATCHES_A_CALL = 6
FLAGS = {
    "model": Flag("GPT", "stages", "stages", MODELS),
    "batch_size": Flag("sequences", 8, 4),
    "num_microbatches": Flag("one launch for each", [2, 4, 8], [4]),
    "ranks": Flag("processes", 2, 2),
    "matmul": Flag("--float32-matmul-precision", "medium", "medium", ("highest", "high", "medium")),
}


def cases(args: argparse.Namespace) -> list[Case]:
    """Raises ConfigError."""
    settings = {"model": model_named(args.model), "batch_size": args.batch_size, "matmul": args.matmul}
    found = []
    for number in args.num_microbatches:
        if number < 1 or args.batch_size % number:
            raise ConfigError(
                f"--num-microbatches={number}: does not divide --batch-size={args.batch_size}; choose a divisor"
            )
        name = f"{args.model}, {args.batch_size} sequences, {args.ranks} ranks, m = {number}"
        microbatches = {**settings, "m": number}
        found.append(Case(name, VARIANTS, PAIRS, microbatches, base="ideal", ranks=args.ranks))
    return found


def build(name: str, case: Case, place: Place) -> Variant:
    from benchmarks.megalite_step import Layout, TrainingStep, Update
    from benchmarks.plain_gpt import PlainGPT, adamw, batch, plain_step

    model, m = case.settings["model"], case.settings["m"]
    tokens, labels = batch(model, case.settings["batch_size"], place.device)
    if name == "ideal":
        plain = PlainGPT(model).to(place.device)
        step = plain_step(plain, adamw(plain.parameters()), tokens, labels, num_microbatches=m)
        return Variant(step, divide_by=place.ranks)
    kind, _, schedule = name.partition("-")
    if kind == "torch":
        return torch_pipeline(schedule, model, m, place, tokens, labels)
    layout = Layout(pp=place.ranks, schedule=schedule, num_microbatches=m, batches=BATCHES_A_CALL)
    return TrainingStep(model, layout, Update(), place, tokens, labels).variant()


def torch_pipeline(name: str, model: Any, m: int, place: Place, tokens: Tensor, labels: Tensor) -> Variant:
    """A schedule of torch.distributed.pipelining over the plain model."""
    from torch.distributed.pipelining import PipelineStage, schedules

    from benchmarks.plain_gpt import PlainGPT, adamw, loss_of

    kinds: dict[str, Any] = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "interleaved-zb": schedules.ScheduleInterleavedZeroBubble,
        "zb-v": schedules.ScheduleZBVZeroBubble,
    }
    rank, ranks = place.rank, place.ranks
    numbers = [rank] if name in ("gpipe", "1f1b") else [rank, 2 * ranks - 1 - rank if name == "zb-v" else rank + ranks]
    count = len(numbers) * ranks
    modules = [PlainGPT(model, number, count).to(place.device) for number in numbers]
    stages = [
        PipelineStage(module, number, count, place.device) for module, number in zip(modules, numbers, strict=True)
    ]
    schedule = kinds[name](stages if len(stages) > 1 else stages[0], m, loss_fn=loss_of)
    optimizer = adamw([p for module in modules for p in module.parameters()])
    inputs = [tokens] if 0 in numbers else []
    targets: dict[str, Any] = {"target": labels, "losses": []} if count - 1 in numbers else {}

    def step() -> None:
        schedule.step(*inputs, **targets)
        targets.get("losses", []).clear()
        optimizer.step()
        optimizer.zero_grad()

    return Variant(step)


BENCHMARK = Benchmark("pipeline", __doc__, FLAGS, cases, build, VARIANTS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
