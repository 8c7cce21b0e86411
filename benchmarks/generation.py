"""Generation: a pipeline with a group of sequences for each stage, beside one process with all of them.

    python benchmarks/generation.py                               # two processes, 512 sequences
    python benchmarks/generation.py --quick --check               # compared with baseline.json
    python benchmarks/generation.py --ranks 1 --model gpt2 --sequences 64 --precision bf16          # a GPU

Every rank has one thread. `megalite-one` continues all sequences together in one process (all ranks do so at once, so
that all variants have the same memory bandwidth); `megalite-pp` has a group for each stage, `megalite-tp` shares each
layer. With one rank the peer is transformers' own generate(), eager as it is by default.
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

VARIANTS = ("megalite-one", "megalite-pp", "megalite-tp", "transformers")
FLAGS = {
    "model": Flag("of the benchmarks' sizes", "stages", "stages", choices=MODELS),
    "sequences": Flag("that are continued", 512, 64),
    "prompt": Flag("tokens of each prompt", 32, 32),
    "new": Flag("tokens that are generated", 32, 32),
    "ranks": Flag("processes", 2, 2),
    "precision": Flag("of weights and products", "fp32", "fp32", ("fp32", "bf16")),
}


def cases(args: argparse.Namespace) -> list[Case]:
    names = ("model", "sequences", "prompt", "new", "precision")
    settings: dict[str, Any] = {name: getattr(args, name) for name in names}
    ranks = f"{args.ranks} ranks, " if args.ranks > 1 else ""
    name = f"{args.sequences} sequences, {args.prompt} + {args.new} tokens, {args.model}, {ranks}{args.precision}"
    work = (float(args.sequences * args.new), "tokens")
    if args.ranks == 1:
        return [Case(name, ("megalite-one", "transformers"), (("megalite-one", "transformers"),), settings, *work)]
    pairs = (("megalite-pp", "megalite-one"),)
    return [Case(name, VARIANTS[:3], pairs, settings, *work, base="megalite-one", ranks=args.ranks)]


def build(name: str, case: Case, place: Place) -> Variant:
    """The whole generation of all sequences, greedy."""
    import torch

    if name == "transformers":
        return by_transformers(case, place)

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
    dtype = torch.bfloat16 if given["precision"] == "bf16" else torch.float32
    context = LayerContext(tp=mesh["tp"], device=place.device, dtype=dtype)
    stack = build_stack(config, specs[cuts[own] : cuts[own + 1]], context, init_seed=1).requires_grad_(False).eval()
    placement = StagePlacement(stages, (tuple(range(stages)),))
    pairs = placement.neighbours | token_pairs(placement)
    channel = Channel(mesh.over("pp", apart="down"), mesh.over("pp", apart="up"), pairs)
    parts = ModelParts({own: stack}, stages, config, ContextAxes(), dtype, place.device)
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


def by_transformers(case: Case, place: Place) -> Variant:
    """Its GPT-2 of the same sizes with its cache."""
    import torch

    from benchmarks.single import transformers_gpt

    given = case.settings
    config = replace(model_named(given["model"]), seq_length=given["prompt"] + given["new"])
    with place.device:
        dtype = torch.bfloat16 if given["precision"] == "bf16" else torch.float32
        peer = transformers_gpt(config).to(dtype).eval()
        ids = torch.randint(config.vocab_size or 2, (given["sequences"], given["prompt"]))
    new = {"min_new_tokens": given["new"], "max_new_tokens": given["new"], "do_sample": False, "use_cache": True}

    def run() -> None:
        with torch.inference_mode():
            found = peer.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **new)
        assert found.shape[1] == given["prompt"] + given["new"]

    return Variant(run)


BENCHMARK = Benchmark("generation", __doc__, FLAGS, cases, build, VARIANTS, {"transformers": "transformers"})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
