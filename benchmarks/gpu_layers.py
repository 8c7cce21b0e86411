"""One layer at a time on a GPU: what docs/gpus.md counts and estimates (budgets.py, masks.py, roofline.py), measured.

    python benchmarks/gpu_layers.py --json gpu_layers.json        # every layer and every mask: some minutes
    python benchmarks/gpu_layers.py --what masks                  # attention alone, for every kind of mask

Layers of true size, one micro-batch forward and backward with gradients added up in fp32, eager and compiled; attention
of 32 heads on 8 of keys over 8,192 tokens for every mask, beside torch's own causal one. Launches are those of the
profiler, in one more call. MFU counts causal attention half. Of layers that several GPUs would share, none is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks import budgets
from benchmarks.harness import Benchmark, Flag
from benchmarks.masks import CHANNELS, GROUPS, HEADS, LENGTH, attention
from benchmarks.turns import Case, Place, Variant

MASKS = {
    "megalite-causal": "causal",
    "megalite-documents": "documents",
    "megalite-window": "a window",
    "megalite-documents-window": "documents, a window",
    "megalite-cap": "a cap",
    "megalite-sinks": "sinks",
    "megalite-all-but-dropout": "documents, a window, a cap, sinks",
    "megalite-dropout": "dropout",
    "megalite-all": "all of them",
}
"""Variant -> its kind in masks.py."""
LAYERS = ("megalite", "megalite-compiled")
SMALL = "--hidden-size 128 --num-attention-heads 4 --seq-length 64"
FLAGS = {
    "what": Flag("layers, masks", ["layers", "masks"], ["layers"], ("layers", "masks")),
    "layers": Flag("whose names begin so", [""], ["GPT"]),
    "threads": Flag("CPU threads", 1, 1),
}


def layers() -> dict[str, budgets.Case]:
    """Those of the pages' tables that one GPU holds."""
    from benchmarks.roofline import rows

    return {case.name: case for case in (*rows(), *budgets.CASES) if "tensor-model-parallel" not in case.flags}


def cases(args: argparse.Namespace) -> list[Case]:
    from benchmarks.layer_cost import LayerCost
    from benchmarks.roofline import seconds_of

    found = []
    shared = {"threads": args.threads, "launches": True}
    if "masks" in args.what:
        settings = {**shared, "kind": "masks"}
        heads = f"{GROUPS * HEADS} heads on {GROUPS} of keys, {LENGTH:,} tokens"
        pairs, flops = (("megalite-causal", "sdpa"),), 3.5 * 2 * LENGTH**2 * GROUPS * HEADS * CHANNELS
        found.append(Case(heads, (*MASKS, "sdpa"), pairs, settings, flops=flops, inner=5))
    for name, case in layers().items():
        if "layers" in args.what and name.startswith(tuple(args.layers)):
            if args.quick:
                case = case._replace(flags=f"{case.flags} {SMALL} --micro-batch-size 2")
            config = budgets.config_of(case)
            tokens = config.training.micro_batch_size * config.model.seq_length
            flops = seconds_of(config, LayerCost(0, 0, 0, 0, 0), case.layer).flops
            settings = {**shared, "kind": "layer", "config": config, "layer": case.layer}
            pairs = (("megalite-compiled", "megalite"),)
            found.append(Case(name, LAYERS, pairs, settings, tokens, "tokens", inner=3, flops=flops))
    return found


def build(name: str, case: Case, place: Place) -> Variant:
    import torch

    torch.manual_seed(0)
    if case.settings["kind"] == "masks":
        run, leaves = causal_by_torch(place.device) if name == "sdpa" else ours(MASKS[name], place.device)
        gradient = torch.randn_like(run())
        return Variant(lambda: torch.autograd.grad(run(), leaves, gradient))
    from benchmarks.layer_cost import layer_of
    from megalite.comm import ParallelMesh

    layer, weights, x = layer_of(
        case.settings["config"], case.settings["layer"], ParallelMesh.single(), place.device,
        compiled=name == "megalite-compiled" and place.device.type == "cuda",
    )  # fmt: skip
    with torch.no_grad():
        for tensor in (x, *weights):
            tensor.normal_(0.0, 1.0 if tensor is x else 0.02)
    dy = torch.randn_like(layer())

    def forward_and_backward() -> None:
        x.grad = None
        layer().backward(dy)

    return Variant(forward_and_backward)


def ours(kind: str, device: Any) -> tuple[Callable[[], Any], list[Any]]:
    from megalite.comm import ContextAxes

    return attention(kind, device, ContextAxes())


def causal_by_torch(device: Any) -> tuple[Callable[[], Any], list[Any]]:
    import torch
    from torch.nn import functional as F

    settings: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    shapes = ((HEADS * GROUPS, LENGTH), (GROUPS, LENGTH), (GROUPS, LENGTH))
    q, k, v = (torch.randn(1, *shape, CHANNELS, **settings).requires_grad_() for shape in shapes)
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), [q, k, v]


BENCHMARK = Benchmark("gpu_layers", __doc__, FLAGS, cases, build, (*LAYERS, *MASKS, "sdpa"))

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
