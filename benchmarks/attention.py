"""Attention: forward and backward of megalite's core, beside torch's fused attention and plain products.

    python benchmarks/attention.py                                # 128 to 2,048 tokens, fp32 and bf16
    python benchmarks/attention.py --quick --check                # compared with baseline.json

6 heads of 64 channels and 2,048 tokens in a batch, or one sequence. `megalite` takes queries, keys and values as its
projection leaves them, `[s, b, heads, 3, d]`; the others `[b, heads, s, d]`. Packed documents and a window of an eighth
of the sequence are compared with causal attention to all of it: bars 2.5 and 1.82 (0.40 and 0.55 of its time).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks.harness import Benchmark, Flag
from benchmarks.turns import Case, Place, Variant

VARIANTS = ("megalite", "sdpa", "plain", "megalite-documents", "megalite-window", "megalite-cap")
HEADS, CHANNELS, TOKENS = 6, 64, 2048
FLAGS = {
    "lengths": Flag("tokens of a sequence", [128, 256, 512, 1024, 2048], [256, 1024]),
    "precisions": Flag("of all tensors", ["fp32", "bf16"], ["fp32", "bf16"], ("fp32", "bf16")),
    "threads": Flag("CPU threads", 1, 1),
}


def cases(args: argparse.Namespace) -> list[Case]:
    pairs = (("megalite", "sdpa"), ("megalite", "plain"))
    whole = [
        Case(f"{length} tokens, {precision}", VARIANTS[:3], pairs,
             {"length": length, "bf16": precision == "bf16", "threads": args.threads}, inner=5)
        for precision in args.precisions
        for length in args.lengths
    ]  # fmt: skip
    parts, seen = VARIANTS[3:5], "2048 tokens, of which an eighth is seen"
    settings = {"length": 2048, "bf16": False, "threads": args.threads}
    return [*whole, Case(seen, ("megalite", *parts), tuple((part, "megalite") for part in parts), settings, inner=2)]


def build(name: str, case: Case, place: Place) -> Variant:
    import torch
    from torch import Tensor
    from torch.nn import functional as F

    from megalite.nn import AttentionCore
    from megalite.visibility import Documents

    s = case.settings["length"]
    heads, channels = case.settings.get("heads", HEADS), case.settings.get("channels", CHANNELS)
    b = max(1, case.settings.get("tokens", TOKENS) // s)
    dtype = torch.bfloat16 if case.settings["bf16"] else torch.float32
    settings: dict[str, Any] = {"dtype": dtype, "device": place.device}
    if name.startswith("megalite"):
        packed = torch.randn(s, b, heads, 3, channels, **settings).requires_grad_()
        gradient = torch.randn(s, b, heads * channels, **settings)
        window, cap = s // 8 if name == "megalite-window" else None, 50.0 if name == "megalite-cap" else None
        core = AttentionCore(product_dtype=dtype, window=window, softcap=cap)
        starts = torch.arange(s).expand(b, s) // (s // 8) * (s // 8)
        hidden: Any = {}
        if name == "megalite-documents":  # as a micro-batch brings them
            hidden = {"document_starts": starts.to(place.device), "documents": Documents.of(starts, place.device)}

        def ours() -> None:
            q, k, v = packed.split(1, 3)
            torch.autograd.grad(core(q, k.squeeze(3), v.squeeze(3), packed=packed, **hidden), packed, gradient)

        return Variant(ours)
    q, k, v = (torch.randn(b, heads, s, channels, **settings).requires_grad_() for _ in range(3))
    gradient = torch.randn(b, heads, s, channels, **settings)
    mask = torch.full((s, s), float("-inf"), **settings).triu_(1)

    def result() -> Tensor:
        if name == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = torch.matmul(q, k.transpose(-1, -2)) * channels**-0.5 + mask
        return torch.matmul(torch.softmax(scores, -1), v)

    return Variant(lambda: torch.autograd.grad(result(), (q, k, v), gradient))


BENCHMARK = Benchmark("attention", __doc__, FLAGS, cases, build, VARIANTS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
