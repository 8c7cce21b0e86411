"""How many kernels a block of a compiled GPT launches and how many bytes they move, megalite's beside nanoGPT's,
counted without a GPU; and the step of a GPT of 1.3B parameters on one H100 that follows from it.

    python benchmarks/launches.py          # about a minute

Graphs are captured and cut into kernels by inductor with the rules of its Triton backend, and then run operation by
operation: what is counted of a graph are its groups of fused operations and the library's calls beside them. Outside
of graphs every operation that is no view is a launch. A model of four blocks less one of two gives a block; its
gradients are added to those of an earlier micro-batch, except for the estimate, whose step has one. nanoGPT's block is
written down from its published structure: mixed precision by autocast over fp32 weights, the whole model one graph.

The estimate is a roofline, not a measurement: products at 680 TFLOP/s (200 where the rows of the vocabulary are odd in
number: tensor cores read unaligned rows slowly), attention at 372 TFLOP/s, all else by counted bytes at 2.8 TB/s.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed


def main(argv: list[str]) -> int:
    """Prints the tables; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from benchmarks.counted_launches import Traffic, estimate, nanogpt, of_a_block, of_a_logit, ours

    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        print(
            f"torch {torch.__version__} compiles nothing while operations are counted; use torch 2.13", file=sys.stderr
        )
        return 2
    models = {"nanoGPT": nanogpt, "megalite": ours}
    for name, make in models.items():
        for direction, kinds in zip(("forward", "backward"), of_a_block(make), strict=True):
            told = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
            print(f"{name:<9} {direction:<9} {sum(kinds.values()):>3} launches  ({told})")
    counts = {name: (Traffic.of_a_block(make), of_a_logit(name)) for name, make in models.items()}
    for name, (block, logit) in counts.items():
        print(
            f"{name:<9} {block.activations:.0f} bytes a token and channel of a block, {block.weights:.1f} a weight, ",
            end="",
        )
        print(f"{logit:.1f} a logit")
    for vocabulary in (50304, 50257):
        for name in models:
            row = estimate(name, vocabulary, *counts[name])
            print(f"{name:<9} V {vocabulary:,}  " + "  ".join(f"{key} {value:.1f}" for key, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
