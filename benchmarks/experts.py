"""Experts: the sparse MLP of a block, beside a dense MLP of equal active FLOPs and transformers' Mixtral block.

    python benchmarks/experts.py                                  # one process, fp32 and bf16; and over two ranks
    python benchmarks/experts.py --quick --check                  # compared with baseline.json

8 experts of width 512, top-2, gated, h = 512; forward and backward, gradients added up in fp32. `dense` is megalite's
MLP of width 1,024. `megalite-ep` deals the experts out over the ranks, each with its part of the tokens;
`megalite-one` has them all in one process (all ranks run it at once, so that both have the same memory bandwidth).
Bars: 0.85 of dense, 1.0 of transformers, two ranks 1.6 times as fast as one.

On glibc freed memory is kept (`mallopt`): by default the C library gives pieces of some MB back to the system, each
variant at other moments, and the page faults that follow were up to a third of a dense MLP's time.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks.harness import Benchmark, Flag
from benchmarks.turns import Case, Place, Variant

BLOCK, SHARED = ("megalite", "dense", "transformers"), ("megalite-ep", "megalite-one")
HIDDEN, WIDTH, EXPERTS, CHOSEN = 512, 512, 8, 2
FLAGS = {
    "tokens": Flag("tokens of a micro-batch", 2048, 2048),
    "precisions": Flag("of all weights", ["fp32", "bf16"], ["fp32", "bf16"], ("fp32", "bf16")),
    "ranks": Flag("processes that share the experts", 2, 2),
}


def cases(args: argparse.Namespace) -> list[Case]:
    found = []
    pairs = (("megalite", "dense"), ("megalite", "transformers"))
    for precision in args.precisions:
        settings = {"tokens": args.tokens, "bf16": precision == "bf16"}
        size, work = f"{args.tokens} tokens, {precision}", (float(args.tokens), "tokens")
        found.append(Case(f"block, {size}", BLOCK, pairs, settings, *work, base="megalite"))
        common: dict[str, Any] = {"base": SHARED[1], "ranks": args.ranks}
        found.append(Case(f"{args.ranks} ranks, {size}", SHARED, (SHARED,), settings, *work, **common))
    return found


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """For the rest of this process."""
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "mallopt"):
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            library.mallopt(option, 2**30)


def build(name: str, case: Case, place: Place) -> Variant:
    import torch

    keep_freed_memory()
    dtype = torch.bfloat16 if case.settings["bf16"] else torch.float32
    torch.manual_seed(0)
    tokens = case.settings["tokens"]
    if name == "megalite-ep":
        tokens //= place.ranks
    sizes = case.settings.get("hidden", HIDDEN), case.settings.get("width", WIDTH)
    x = torch.randn(tokens, 1, sizes[0], dtype=dtype, device=place.device).requires_grad_()
    gradient = torch.randn_like(x)
    run = theirs(dtype, place, *sizes) if name == "transformers" else ours(name, dtype, place, tokens, *sizes)

    def forward_and_backward() -> None:
        x.grad = None
        run(x).backward(gradient)

    return Variant(forward_and_backward)


def ours(name: str, dtype: Any, place: Place, tokens: int, hidden: int, width: int) -> Any:
    """The sparse MLP, or the dense one of as many products a token."""
    import torch

    from megalite.comm import ExpertAxes, ParallelMesh, share_axis
    from megalite.config import Experts, ModelConfig
    from megalite.gradient import GradSink, attach_sink
    from megalite.microbatch import Microbatch
    from megalite.nn import Block
    from megalite.parallel.expert import expert_axes
    from megalite.parallel.tensor import LayerContext

    sparse = Experts(num_experts=EXPERTS, moe_router_topk=CHOSEN, moe_ffn_hidden_size=width)
    config = ModelConfig(
        hidden_size=hidden, num_layers=1, num_attention_heads=8, seq_length=tokens, activation="swiglu",
        add_bias_linear=False, ffn_hidden_size=CHOSEN * width, experts=Experts() if name == "dense" else sparse,
    )  # fmt: skip
    axes = ExpertAxes()
    if name == "megalite-ep":
        mesh = ParallelMesh.build(rank=place.rank, size=place.ranks, ep=place.ranks)
        mesh.adopt(share_axis(mesh["ep"]))
        axes = expert_axes(mesh)
    ctx = LayerContext(dtype=dtype, device=place.device, experts=axes)
    layer = Block(config, 0, ctx).mlp
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        attach_sink(parameter, GradSink(torch.zeros_like(parameter, dtype=torch.float32)))
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=place.device)
    batch = Microbatch(ids, ids, ids, ids, ids[0, :1])

    def run(x: Any) -> Any:
        for segment in layer.segments(batch):
            x = segment.run(x)
        return x

    return run


def theirs(dtype: Any, place: Place, hidden: int, width: int) -> Any:
    """Its weights' gradients stay in their own dtype."""
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=width, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN
    )
    make: Any = MixtralSparseMoeBlock
    block = make(config).to(place.device, dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return block


PEERS = {"transformers": "transformers"}
BENCHMARK = Benchmark("experts", __doc__, FLAGS, cases, build, (*BLOCK, *SHARED), PEERS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
