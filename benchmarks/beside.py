"""Steps of megalite beside those of its peers, by one roofline: by what each moves, not by what it was seen to do.

    python benchmarks/beside.py             # the table, from what was counted before
    python benchmarks/beside.py --write     # counts again (some minutes), and writes the table into docs/gpus.md

Nothing is measured. Blocks of megalite, and of nanoGPT's and torchtitan's published structure, are compiled and counted
(`counted_launches.py`); of Megatron's sparse block the published fused kernels are taken, each of which reads and
writes its tensors once. Products, attention and rates are those of `roofline.py`, products in float8 at 1,200 TFLOP/s.
Messages, recomputation, gaps between kernels and what FSDP copies are left out for everybody.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks import gpu_page
from benchmarks.budgets import CASES, Case
from benchmarks.roofline import MEMORY, PRODUCTS, SPARSE, config_of, seconds_of

if TYPE_CHECKING:
    from megalite.config import Config

FLOAT8 = 1200e12
GPUS = 8
FUSED_OPERAND = 6.0
"""Bytes an element of an operand that a fused pass moves: read for the largest magnitude and for rounding, written both
ways round."""
NAMES = {
    "GPT": "GPT, megalite",
    "nanoGPT": "GPT, nanoGPT",
    "Llama": "Llama 3 8B, megalite",
    "torchtitan": "Llama 3 8B, torchtitan",
    "Qwen": "Qwen3-30B-A3B, megalite",
}
PUBLISHED = {
    "torchtitan": "6,667 (torchtitan, 8 H100, 2024)",
    "Megatron 8B": "14,451 (Megatron-Bridge)",
    "Megatron 30B": "8,826 to 9,058 (Megatron-Bridge)",
}
"""Tokens/s a GPU, measured by the peers: with messages and, where they need it, recomputation."""


class Counts(NamedTuple):
    """What is counted. blocks: bytes a token and channel that a compiled block moves beside products, by name.
    launches: its launches forward and backward. logits: bytes a logit. float8: bytes an element of an operand."""

    blocks: dict[str, float]
    launches: dict[str, list[int]]
    logits: dict[str, float]
    float8: float


class Step(NamedTuple):
    """Seconds of a step of one micro-batch on each GPU. tokens: of a GPU."""

    tokens: int
    products: float
    attention: float
    beside: float
    head: float
    update: float

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.beside + self.head + self.update

    @property
    def rate(self) -> float:
        """Tokens/s of a GPU."""
        return self.tokens / self.seconds


def step_of(
    case: Case, layers: int, vocabulary: int, parameters: float, moved: float, logit: float, *, float8: float = 0.0
) -> Step:
    """A step of a model whose layers are those of `case`. moved: bytes of a layer beside products. logit: of a logit.
    parameters: whose update a GPU computes. float8: bytes an element of an operand; 0: products in bf16."""
    from benchmarks.layer_cost import LayerCost

    config = config_of(case)
    one = seconds_of(config, LayerCost(0, 0, 0, 0, 0))
    tokens = config.training.micro_batch_size * config.model.seq_length
    products, beside = one.products, moved / MEMORY
    if float8:
        products *= PRODUCTS / FLOAT8
        beside += float8 * operands_of(config) / MEMORY
    h = config.model.hidden_size
    head = 6.0 * tokens * h * vocabulary / PRODUCTS + logit * tokens * vocabulary / MEMORY
    update = 42.0 * parameters / MEMORY
    return Step(tokens, layers * products, layers * one.attention, layers * beside, head, update)


def operands_of(config: Config) -> float:
    """Elements of x and dy of all products of a layer whose inputs float8 rounds; experts: rows of all choices."""
    from megalite.inventory import micro_tokens, model_layers

    total, given = 0.0, config.model.experts
    for product in model_layers(config.model)[1].products:
        if product.core or product.name.startswith("router"):
            continue
        n, k = product.local(product.shards(config.parallel))
        rows = float(micro_tokens(config))
        if product.name.startswith("experts."):
            n, k = (n // given.moe_router_topk, k) if product.cut == "n" else (n, k // given.moe_router_topk)
            rows *= given.moe_router_topk
        total += rows * (n + k)
    return total


def fused_sparse_bytes(config: Config) -> float:
    """What a sparse layer moves beside products if each of Megatron's fused kernels reads what it needs and writes what
    it makes once, in bf16: two norms, two sums with the residual, norms and rotation of queries and keys, the router's
    scores, rows there and back, the gated activation with the weights in it."""
    from megalite.inventory import micro_tokens

    model, given = config.model, config.model.experts
    h, k, f = model.hidden_size, given.moe_router_topk, model.expert_ffn_size
    norms, sums, heads = 2 * 5 * h, 2 * 6 * h, (5 + 4) * (model.query_size + model.kv_size)
    rows, activation, scores = 4 * (k + 1) * h, 8 * f * k, 2 * 4 * (given.num_experts or 1)
    return 2.0 * micro_tokens(config) * (norms + sums + heads + rows + activation + scores)


def counts() -> Counts:
    """Counts everything; minutes."""
    from benchmarks import counted_launches as counted
    from benchmarks.beside_blocks import llama, of_an_operand, qwen, titan

    makes = {"GPT": counted.ours, "nanoGPT": counted.nanogpt, "Llama": llama, "torchtitan": titan, "Qwen": qwen}
    blocks = {name: counted.Traffic.of_a_block(make).activations for name, make in makes.items()}
    del makes["Qwen"]  # its products are those of a CPU, one expert after the other
    return Counts(
        blocks,
        {name: [sum(part.values()) for part in counted.of_a_block(make)] for name, make in makes.items()},
        {name: counted.of_a_logit(name) for name in ("nanoGPT", "megalite")},
        of_an_operand(),
    )


class Row(NamedTuple):
    """A step beside another. asked: how many times as fast it should be. published: what the peer has."""

    what: str
    ours: Step
    whom: str
    theirs: Step
    asked: float
    published: str = ""


def cases() -> tuple[Case, Case, Case]:
    """The blocks: of GPT 1.3B, Llama 8B, and Qwen3-30B-A3B with the experts that one of 8 GPUs has, evenly loaded."""
    gpt, llama = (next(case for case in CASES if case.name.startswith(name)) for name in ("GPT", "Llama 8B"))
    sparse = next(case for case in CASES if case.name == SPARSE)
    return gpt, llama, sparse._replace(flags=f"{sparse.flags} --num-experts 16")


def rows(found: Counts) -> list[Row]:
    """What the page compares."""
    gpt, llama, sparse = cases()
    ours, theirs = found.logits["megalite"], found.logits["nanoGPT"]

    def moved(case: Case, name: str) -> float:
        config = config_of(case)
        return (
            found.blocks[name] * config.training.micro_batch_size * config.model.seq_length * config.model.hidden_size
        )

    def small(name: str, logit: float) -> Step:
        return step_of(gpt, 24, 50304, 1.3e9, moved(gpt, name), logit)

    def large(name: str, logit: float, float8: float = 0.0) -> Step:
        return step_of(llama, 32, 128256, 8.03e9 / GPUS, moved(llama, name), logit, float8=float8)

    def mixed(bytes_of_a_layer: float, logit: float, float8: float = 0.0) -> Step:
        return step_of(sparse, 48, 151936, 30.5e9 / 16, bytes_of_a_layer, logit, float8=float8)

    plain, fused = moved(sparse, "Qwen"), fused_sparse_bytes(config_of(sparse))
    wide, narrow = large("Llama", ours), large("Llama", ours, found.float8)
    titan, qwen = large("torchtitan", theirs), mixed(plain, ours)
    return [
        Row("GPT 1.3B, one GPU", small("GPT", ours), "nanoGPT, compiled", small("nanoGPT", theirs), 1.0),
        Row("Llama 3 8B, 8 GPUs", wide, "torchtitan, compiled", titan, 1.0, PUBLISHED["torchtitan"]),
        Row("Llama 3 8B, 8 GPUs, fp8", narrow, "its own bf16", wide, 1.25, PUBLISHED["Megatron 8B"]),
        Row("Qwen3-30B-A3B, 16 GPUs, ep 8", qwen, "Megatron's kernels, bf16", mixed(fused, theirs), 0.9),
        Row(
            "Qwen3-30B-A3B, 16 GPUs, ep 8", qwen, "Megatron's kernels, fp8",
            mixed(fused, theirs, FUSED_OPERAND), 0.9, PUBLISHED["Megatron 30B"],
        ),
        Row(
            "the same, if experts were in fp8", mixed(plain, ours, found.float8),
            "Megatron's kernels, fp8", mixed(fused, theirs, FUSED_OPERAND), 0.9,
        ),
    ]  # fmt: skip


def table(found: Counts) -> str:
    """The lines of the page: what blocks take, and the steps."""
    _, _, sparse = cases()
    config = config_of(sparse)
    channels = config.training.micro_batch_size * config.model.seq_length * config.model.hidden_size
    lines = [
        "| a block, compiled | launches forward | backward | bytes a token and channel |",
        "| --- | --- | --- | --- |",
    ]
    for name, nbytes in found.blocks.items():
        forward, backward = found.launches.get(name, ("", ""))
        lines.append(f"| {NAMES[name]} | {forward} | {backward} | {nbytes:.0f} |")
    lines += [f"| Qwen3-30B-A3B, Megatron's fused kernels | | | {fused_sparse_bytes(config) / channels:.0f} |", ""]
    lines += [
        "| a step, one micro-batch a GPU | ms: products, attention, elementwise, head, update | tokens/s a GPU | "
        "beside | ms | tokens/s | times as fast (asked for) | published |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows(found):
        mine, peer = (", ".join(f"{1e3 * x:.0f}" for x in each[1:]) for each in (row.ours, row.theirs))
        times = f"{row.ours.rate / row.theirs.rate:.2f} ({row.asked:g})"
        lines.append(
            f"| {row.what} | {mine} | {row.ours.rate:,.0f} | {row.whom} | {peer} | {row.theirs.rate:,.0f} | {times} | "
            f"{row.published} |"
        )
    return "\n".join(lines) + "\n"


def held() -> Counts:
    """What was counted before."""
    return Counts(**gpu_page.held("beside"))


def text(write: bool) -> str:
    """The table of what was counted: now where `write`, else before."""
    if write:
        gpu_page.keep("beside", counts()._asdict())
    return table(held())


def main(argv: Sequence[str]) -> int:
    """Prints or writes the table; the exit status."""
    return gpu_page.print_or_write("beside", __doc__, text, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
