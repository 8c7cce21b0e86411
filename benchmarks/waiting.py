"""What schedules are worth on more ranks than this machine has cores: a GPT whose blocks wait instead of computing.

    python benchmarks/waiting.py                                  # four processes; 4 and 8 micro-batches
    python benchmarks/waiting.py --ranks 8 --num-microbatches 16
    python benchmarks/waiting.py --slow 1.5 --varies 0.5          # one slow rank, and times that vary: message-driven
    python benchmarks/waiting.py --quick

Every stage waits --forward-ms in the forward of a micro-batch, twice that in its backward; everything else is as in a
run: the executor, the messages, the update. `bound` waits that long for the batch and does nothing else: a pipeline
without bubbles. Steps must be long beside what a rank computes (a few ms a micro-batch, all ranks on the same cores).
--slow: the third rank from the end takes so many times as long. --varies: each wait is drawn anew, longer or shorter by
this share at most, the same draws for every variant; both compare schedules that differ in who waits for whom.
An asynchronous schedule runs several batches in a call, without draining between them, and is divided by their number.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks.harness import Benchmark, Flag
from benchmarks.turns import Case, Place, Variant
from megalite.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

VARIANTS = ("bound", "megalite-2bw", "megalite-1f1b", "megalite-gpipe", "megalite-interleaved")
ARRIVALS = ("bound", "megalite-message-driven", "megalite-eager-1f1b", "megalite-1f1b")
UNEVEN = (("megalite-message-driven", "megalite-eager-1f1b"), ("megalite-message-driven", "megalite-1f1b"))
PAIRS = (("megalite-2bw", "megalite-1f1b"), ("megalite-1f1b", "bound"), ("megalite-2bw", "bound"))
BATCHES_A_CALL = 6
FLAGS = {
    "ranks": Flag("processes", 4, 4),
    "num_microbatches": Flag("one launch for each", [4, 8], [4]),
    "forward_ms": Flag("of a stage and micro-batch", 40, 40),
    "slow": Flag("factor of the third rank from the end", 1.0, 1.0),
    "varies": Flag("share by which a wait is longer or shorter", 0.0, 0.0),
}


def cases(args: argparse.Namespace) -> list[Case]:
    """Raises ConfigError."""
    if args.ranks < 2 or min(args.num_microbatches) < args.ranks:
        raise ConfigError(f"--ranks={args.ranks}: 2 at least, and as many --num-microbatches; use --ranks=2")
    settings = {"forward": args.forward_ms / 1000, "slow": args.slow, "varies": args.varies}
    uneven = args.slow != 1 or args.varies > 0
    what = f", slow {args.slow:g}, varies {args.varies:g}" if uneven else ""
    variants, pairs = (ARRIVALS, UNEVEN) if uneven else (VARIANTS, PAIRS)
    return [
        Case(
            f"{args.ranks} ranks, m = {m}{what}", variants, pairs, {**settings, "m": m}, base="bound", ranks=args.ranks
        )
        for m in args.num_microbatches
    ]


def build(name: str, case: Case, place: Place) -> Variant:
    from benchmarks.megalite_step import Layout, TrainingStep, Update, tiny_model
    from benchmarks.plain_gpt import batch
    from megalite.schedule import resolve_chunks

    forward, m = case.settings["forward"], case.settings["m"]
    if name == "bound":
        return Variant(partial(time.sleep, 3 * forward * m * max(1, case.settings["slow"])))
    schedule = name.removeprefix("megalite-")
    chunks = resolve_chunks(schedule, None)
    model = tiny_model(chunks * place.ranks)
    tokens, labels = batch(model, m, place.device)
    layout = Layout(pp=place.ranks, schedule=schedule, num_microbatches=m, batches=BATCHES_A_CALL)
    step = TrainingStep(model, layout, Update(), place, tokens, labels)
    slow = case.settings["slow"] if place.rank == max(0, place.ranks - 3) else 1.0
    varies, whole = case.settings["varies"], slow * forward / chunks
    # Of its own for forwards and for backwards: both run by micro-batch, so every schedule waits as long for each.
    coins = [random.Random(f"{place.rank} {kind}") for kind in "FB"]
    for stage in step.executor.stages.values():
        for module in stage.modules:
            wait_beside(module, whole, *(partial(share, coin, varies) for coin in coins))
    return step.variant()


def share(coin: random.Random, varies: float) -> float:
    """1, more or less by `varies` at most."""
    return 1 + varies * coin.uniform(-1, 1)


def wait_beside(
    stage: nn.Module,
    forward: float,
    forward_share: Callable[[], float] = lambda: 1.0,
    backward_share: Callable[[], float] = lambda: 1.0,
) -> None:
    """Its forward takes so many seconds more, its backward twice as many; each times its share."""
    import torch

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            time.sleep(forward * forward_share())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dx: Tensor) -> Tensor:
            time.sleep(2 * forward * backward_share())
            return dx

    wait: Any = Wait
    stage.register_forward_hook(lambda module, inputs, output: wait.apply(output))


BENCHMARK = Benchmark("waiting", __doc__, FLAGS, cases, build, (*VARIANTS, *ARRIVALS[1:3]))

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
