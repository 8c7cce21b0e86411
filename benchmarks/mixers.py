"""CPU time of a block with another mixer beside a block with attention: forward and backward, one thread.

    python benchmarks/mixers.py delta      # Gated DeltaNet and softmax attention of equal width at 4,096 tokens
    python benchmarks/mixers.py latent     # latent attention and grouped queries, FLOPs equal by the width of the MLP

Both blocks of a pair are timed in turns by the CPU time of this process, so that other programs disturb both alike; the
ratio is the median over the rounds of time with attention / time with the other mixer: above 1 the other one is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megalite.config import ModelConfig

ALL = (
    "--num-layers 1 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --vocab-size 64 --model-type llama "
    "--hidden-size 512"
)
DELTA = "--linear-attention variant=gdn key_head_dim=128 value_head_dim=128 num_key_heads=4 num_value_heads=4"
LATENT = "--mla q_lora_rank=192 kv_lora_rank=64 qk_head_dim=64 qk_pos_emb_head_dim=32 v_head_dim=64 --qk-layernorm"
PAIRS = {
    "delta": (
        f"{ALL} --num-attention-heads 4 --seq-length 4096",
        f"{ALL} --num-attention-heads 4 --seq-length 4096 {DELTA}",
    ),
    "latent": (
        f"{ALL} --num-attention-heads 8 --seq-length 1024 --num-query-groups 2",
        f"{ALL} --num-attention-heads 8 --seq-length 1024 {LATENT}",
    ),
}


class Timed:
    """A block, its input, and what a pass over it takes."""

    def __init__(self, model: ModelConfig) -> None:
        import torch

        from megalite.microbatch import Microbatch
        from megalite.models import build_stack, layer_specs
        from megalite.parallel.tensor import LayerContext

        self.block: nn.Module = build_stack(model, layer_specs(model)[1:2], LayerContext(), init_seed=1)
        self.flops, self.times = flops_of(model) * model.seq_length, list[float]()
        s = model.seq_length
        self.x, nothing = torch.randn(s, 1, model.hidden_size), torch.zeros(1, s, dtype=torch.long)
        at, ones = torch.arange(s)[None], torch.ones(1, s)
        self.batch = Microbatch(nothing, nothing, at, ones, torch.zeros(1, dtype=torch.long))

    def run(self) -> None:
        """Forward and backward."""
        x = self.x.clone().requires_grad_()
        begin = time.process_time()
        y: Tensor = self.block.get_submodule("layers.0")(x, self.batch)
        y.backward(self.x)
        self.times.append(time.process_time() - begin)


def flops_of(model: ModelConfig) -> float:
    """Of the first block, for each token."""
    from megalite.inventory import model_layers

    return model_layers(model)[1].flops()


def model_of(flags: str, ffn: int) -> ModelConfig:
    """The model of `flags` with an MLP of width `ffn`."""
    from megalite.config import parse

    return parse([*flags.split(), "--ffn-hidden-size", str(ffn)], world_size=1).model


def equal_width(flags: str, flops: float, ffn: int) -> int:
    """The multiple of 8 with which the block's FLOPs are nearest to `flops`; ffn: where to begin."""
    base, more = (flops_of(model_of(flags, width)) for width in (ffn, ffn + 8))
    return ffn + 8 * round((flops - base) / (more - base))


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("pair", choices=tuple(PAIRS))
    p.add_argument("--rounds", type=int, default=9)
    args = p.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    flags, ffn = PAIRS[args.pair], 1408
    theirs = model_of(flags[0], ffn)
    if args.pair == "latent":
        ffn = equal_width(flags[1], flops_of(theirs), ffn)
    both = Timed(theirs), Timed(model_of(flags[1], ffn))
    for number in range(args.rounds + 1):
        for each in both if number % 2 else both[::-1]:
            each.run()
    for name, each in zip(("attention", args.pair), both, strict=True):
        each.times.pop(0)
        print(f"{name:>10}: {statistics.median(each.times):.3g} s of CPU, {each.flops / 1e9:.3g} GFLOP forward")
    ratios = [a / b for a, b in zip(both[0].times, both[1].times, strict=True)]
    print(f"     ratio: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} rounds)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
