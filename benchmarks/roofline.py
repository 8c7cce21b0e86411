"""The least that a layer takes on an H100, by what it counts: beside the launches that have to fit into that time.

    python benchmarks/roofline.py             # the table; some seconds
    python benchmarks/roofline.py --write     # ... into docs/gpus.md

Nothing is measured. Launches and bytes beside products are those of `budgets.py` (eager mode), products and attention
those of `megalite.inventory`, and the rates those of `launches.py`. A product takes as long as its operations or its
operands, whichever is longer: where few rows meet many weights, as in experts, that is the memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks import gpu_page
from benchmarks.budgets import CASES, Case, config_of, count

if TYPE_CHECKING:
    from benchmarks.layer_cost import LayerCost
    from megalite.config import Config

PRODUCTS, ATTENTION, MEMORY, PEAK = 680e12, 372e12, 2.8e12, 989e12
SPARSE = "Qwen3-30B-A3B, 4,096 tokens"


def rows() -> list[Case]:
    """Dense layers, and a sparse one with all of its experts or with those that one of 8 GPUs has: as many rows come to
    these as its own tokens send out."""
    sparse = next(case for case in CASES if case.name == SPARSE)
    return [
        *(case for case in CASES if case.name.startswith(("GPT", "Llama"))),
        sparse._replace(name=f"{SPARSE}, all experts"),
        sparse._replace(name=f"{SPARSE}, 16 of 128 experts (ep 8)", flags=f"{sparse.flags} --num-experts 16"),
    ]


class Seconds(NamedTuple):
    """Of a micro-batch forward and backward. flops: of the model's own operations."""

    products: float
    waiting: float  # of the products, what they wait for memory
    attention: float
    beside: float
    flops: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.beside


def seconds_of(config: Config, cost: LayerCost, layer: int = 1) -> Seconds:
    """Of a layer. cost: what it counts."""
    from megalite.inventory import micro_tokens, model_layers

    tokens, parallel, given = micro_tokens(config), config.parallel, config.model.experts
    one = model_layers(config.model)[layer]
    computed = waited = flops = 0.0
    for product in one.products:
        if product.core:
            continue
        n, k = product.local(product.shards(parallel))
        rows, experts = float(tokens), 1
        if product.name.startswith("experts."):  # whose n or k is that of all experts that a token takes
            n, k = (n // given.moe_router_topk, k) if product.cut == "n" else (n, k // given.moe_router_topk)
            rows, experts = tokens * given.moe_router_topk, given.num_experts or 1
        operations = 2 * rows * n * k
        for bytes_of_a_weight in (2, 2, 8):  # read forward and for dx; read and written for dW, in fp32
            moved = 2 * rows * (n + k) + bytes_of_a_weight * experts * n * k
            computed += operations / PRODUCTS
            waited += max(0.0, moved / MEMORY - operations / PRODUCTS)
        flops += 3 * operations
    core = tokens * one.flops(core=True) / parallel.tensor_model_parallel_size
    return Seconds(computed + waited, waited, 3.5 * core / ATTENTION, cost.moved / MEMORY, flops + 3 * core)


def table() -> str:
    """The lines of the page."""
    lines = [
        "| one layer, bf16, ms | products | of it waits for memory | attention | elementwise | together | launches | "
        "one every |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in rows():
        cost = count(case)
        found, launches = seconds_of(config_of(case), cost), cost.forward + cost.backward
        parts = [found.products, found.waiting, found.attention, found.beside, found.total]
        mfu, each = 100 * found.flops / PEAK / found.total, 1e6 * found.total / launches
        numbers = " | ".join(f"{1e3 * x:.2f}" for x in parts)
        lines.append(f"| {case.name} | {numbers} ({mfu:.0f} % MFU) | {launches} | {each:.0f} us |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Prints or writes the table; the exit status."""
    return gpu_page.print_or_write("roofline", __doc__, lambda write: table(), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
