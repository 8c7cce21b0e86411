"""What a block costs on a GPU, counted without one: launches, bytes beside products, waits of the host, memory.

    python benchmarks/budgets.py             # the table; about half a minute
    python benchmarks/budgets.py --write     # ... into docs/gpus.md, and the budgets that a test holds

Layers of true size run forward and backward on a device of bookkeeping without values, in eager mode: see
`benchmarks/layer_cost.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks import gpu_page

if TYPE_CHECKING:
    from benchmarks.layer_cost import LayerCost
    from megalite.config import Config

LLAMA = "--model-type llama --untie-embeddings-and-output-weights"


class Case(NamedTuple):
    """layer: which of [embedding, block 0, ...] is counted; -1: the head. flags: its model and layout."""

    name: str
    flags: str
    layer: int = 1


CASES = (
    Case(
        "GPT 1.3B, 8 x 2,048 tokens",
        "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 8",
    ),
    Case(
        "Llama 8B, 8,192 tokens",
        f"{LLAMA} --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 "
        "--seq-length 8192",
    ),
    Case(
        "Llama 70B, 8,192 tokens, tp 8",
        f"{LLAMA} --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --num-query-groups 8 "
        "--seq-length 8192 --tensor-model-parallel-size 8 --sequence-parallel",
    ),
    Case("Qwen3-30B-A3B, 4,096 tokens", "--config configs/qwen3_30b_a3b.yaml --seq-length 4096"),
    Case("gpt-oss 20B, 4,096 tokens, full attention", "--config configs/gpt_oss_20b.yaml --seq-length 4096", layer=2),
    Case("gpt-oss 20B, 4,096 tokens, a window of 128", "--config configs/gpt_oss_20b.yaml --seq-length 4096"),
    Case(
        "head and loss, 128k words, 8,192 tokens",
        f"{LLAMA} --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --vocab-size 128256",
        layer=-1,
    ),
)


def count(case: Case) -> LayerCost:
    """Counts a case."""
    from benchmarks.layer_cost import cost_of_layer

    return cost_of_layer(config_of(case), case.layer)


def config_of(case: Case) -> Config:
    """A run of the case's model and layout."""
    from megalite.config import read_unjudged

    flags = (
        f"--micro-batch-size 1 {case.flags} --num-layers 2 --bf16 --train-iters 1 --lr 1e-4 --mock-data "
        "--tokenizer-type NullTokenizer --eval-iters 0"
    )
    words = [] if "--config" in flags or "--vocab-size" in flags else ["--vocab-size", "1024"]
    return read_unjudged([*flags.split(), *words])[0]


def table(budgets: dict[str, LayerCost]) -> str:
    """The lines of the page."""
    lines = [
        "| one layer, bf16 | launches forward | backward | the host waits | moved beside products | memory at most |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, budget in budgets.items():
        moved, peak = budget.moved / 1e9, budget.peak / 1e9
        lines.append(
            f"| {name} | {budget.forward} | {budget.backward} | {budget.waits} | {moved:.2f} GB | {peak:.2f} GB |"
        )
    return "\n".join(lines) + "\n"


def counts() -> dict[str, LayerCost]:
    """Of all cases."""
    return {case.name: count(case) for case in CASES}


def held() -> dict[str, LayerCost]:
    """The budgets that were written."""
    from benchmarks.layer_cost import LayerCost

    return {name: LayerCost(**numbers) for name, numbers in gpu_page.held("budgets").items()}


def text(write: bool) -> str:
    """The table of what is counted now, which is kept where `write`."""
    found = counts()
    if write:
        gpu_page.keep("budgets", {name: budget._asdict() for name, budget in found.items()})
    return table(found)


def main(argv: Sequence[str]) -> int:
    """Prints or writes the table; the exit status."""
    return gpu_page.print_or_write("budgets", __doc__, text, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
