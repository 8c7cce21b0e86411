"""Generation: a pipeline with a group of sequences for each stage, beside one process with all of them.

    python benchmarks/generation.py                               # two processes, 512 sequences
    python benchmarks/generation.py --quick --check               # compared with baseline.json

Every rank has one thread. `megalite-one` continues all sequences together in one process (all ranks do so at once, so
that all variants have the same memory bandwidth); `megalite-pp` has a group for each stage, `megalite-tp` shares each
layer.
Bar: pp at least 1.7 times as fast as one process. With few sequences a product of half of the rows takes more than half
of the time (reading the weights does not shrink), so that two stages win less; with one, nothing but memory.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks.harness import MODELS, Benchmark, Flag, model_named
from benchmarks.turns import Case, Place, Variant

VARIANTS = ("megalite-one", "megalite-pp", "megalite-tp")
FLAGS = {
    "model": Flag("of the benchmarks' sizes", "stages", "stages", choices=MODELS),
    "sequences": Flag("that are continued", 512, 64),
    "prompt": Flag("tokens of each prompt", 32, 32),
    "new": Flag("tokens that are generated", 32, 32),
    "ranks": Flag("processes", 2, 2),
}


def cases(args: argparse.Namespace) -> list[Case]:
    settings: dict[str, Any] = {name: getattr(args, name) for name in ("model", "sequences", "prompt", "new")}
    name = f"{args.sequences} sequences, {args.prompt} + {args.new} tokens, {args.model}, {args.ranks} ranks, fp32"
    pairs = (("megalite-pp", "megalite-one"),)
    work = (float(args.sequences * args.new), "tokens")
    return [Case(name, VARIANTS, pairs, settings, *work, base="megalite-one", ranks=args.ranks)]


def build(name: str, case: Case, place: Place) -> Variant:
    """The whole generation of all sequences, greedy."""
    import torch

    from megalite.comm import Channel, ContextAxes, ParallelMesh
    from megalite.generation import Generator, ModelParts, Request, Sampling
    from megalite.models import build_stack, layer_specs
    from megalite.parallel.tensor import LayerContext
    from megalite.schedule import StagePlacement, token_pairs

    given = case.settings
    config = replace(model_named(given["model"]), seq_length=given["prompt"] + given["new"])
    ranks = 1 if name == "megalite-one" else place.ranks
    stages = ranks if name == "megalite-pp" else 1
    whole = ParallelMesh.single()
    mesh = whole if ranks == 1 else ParallelMesh.build(rank=place.rank, size=ranks, tp=ranks // stages, pp=stages)
    own, specs = mesh.coordinate("pp"), layer_specs(config)
    cuts = [len(specs) * stage // stages for stage in range(stages + 1)]
    context = LayerContext(tp=mesh["tp"], device=place.device)
    stack = build_stack(config, specs[cuts[own] : cuts[own + 1]], context, init_seed=1).requires_grad_(False).eval()
    placement = StagePlacement("loop", stages, (tuple(range(stages)),))
    pairs = placement.neighbours | token_pairs(placement)
    channel = Channel(mesh.over("pp", apart="down"), mesh.over("pp", apart="up"), pairs)
    parts = ModelParts({own: stack}, stages, config, ContextAxes(), torch.float32, place.device)
    generator = Generator(parts, own, placement, channel, mesh["pp"])
    shape, seed = (given["sequences"], given["prompt"]), torch.Generator().manual_seed(0)
    drawn = torch.randint(config.vocab_size, shape, generator=seed)
    requests = [Request(number, tuple(ids)) for number, ids in enumerate(drawn.tolist())]
    size = len(requests)

    def run() -> None:
        how = Sampling(greedy=True)
        found = generator.run(requests, how, max_new_tokens=given["new"], stops=(), micro_batch_size=size)
        assert sum(len(ids or []) for ids in found) == size * given["new"]

    return Variant(run)


BENCHMARK = Benchmark("generation", __doc__, FLAGS, cases, build, VARIANTS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
