"""What a sparse block of each recipe launches on a GPU, in eager mode and with --compile, counted without one.

    python benchmarks/sparse_launches.py             # the table; some minutes
    python benchmarks/sparse_launches.py --write     # ... into docs/gpus.md, and the budgets that a test holds

The blocks have the recipe's kinds and eight experts (or four groups of four), width 256. Eager: on the device of
bookkeeping (`layer_cost.py`). Compiled: graphs are cut into kernels by the rules of inductor's Triton backend
(`counted_launches.py`); attention between queries, keys and values is one kernel. Needs torch 2.13.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks import gpu_page

if TYPE_CHECKING:
    from megalite.config import Config

SMALL = (
    "--hidden-size 256 --num-attention-heads 8 --seq-length 256 --num-layers 8 --vocab-size 128 --mock-data "
    "--micro-batch-size 2 --pipeline-model-parallel-size 1 --expert-model-parallel-size 1 --moe-router-topk 2"
)
RECIPES = {
    "mixtral_8x7b": "--num-experts 8",
    "qwen3_30b_a3b": "--num-experts 8",
    "gpt_oss_20b": "--num-experts 8",
    "deepseek_v3": "--num-experts 16 --moe-layer-freq 1 --moe-router num_groups=4 group_topk=2",
    "qwen3_next_80b_a3b": "--num-experts 8",
    "frontier_sparse": "--num-experts 8",
}
LAYER = 8
"""The last of the blocks: with all keys where others have a window, with attention where others have a state."""


class Launches(NamedTuple):
    """Forward and backward of a block in eager mode; the same with --compile."""

    forward: int
    backward: int
    compiled_forward: int
    compiled_backward: int


def config_of(recipe: str) -> Config:
    """Of the recipe, small."""
    from megalite.config import read_unjudged

    argv = ["--config", f"{gpu_page.ROOT}/configs/{recipe}.yaml", *SMALL.split(), *RECIPES[recipe].split()]
    return read_unjudged(argv)[0]


def count(recipe: str) -> Launches:
    """Counts both."""
    from benchmarks.layer_cost import cost_of_layer

    eager = cost_of_layer(config_of(recipe), LAYER)
    return Launches(eager.forward, eager.backward, *compiled(recipe))


@contextmanager
def as_chosen_on_a_gpu() -> Iterator[None]:
    """Its kernels for experts, and one for attention."""
    from benchmarks.counted_launches import as_on_a_gpu

    names = ("nn.attention.core", "parallel.expert.grouped")
    core, grouped = (importlib.import_module(f"megalite.{name}") for name in names)

    with ExitStack() as stack:
        stack.enter_context(as_on_a_gpu())
        stack.enter_context(patch.object(grouped, "by_one_kernel", lambda *_: True))
        stack.enter_context(patch.object(core, "choose", lambda need: "blocked"))
        yield


def compiled(recipe: str) -> tuple[int, int]:
    """Launches forward and backward with --compile."""
    import torch

    from benchmarks.counted_launches import Counting, Graphs
    from megalite.gradient import GradSink, attach_sink
    from megalite.microbatch import Microbatch
    from megalite.models import build_stack, layer_specs
    from megalite.nn import Block
    from megalite.parallel.tensor import LayerContext

    torch._dynamo.reset()
    config, graphs = config_of(recipe), Graphs()
    with as_chosen_on_a_gpu(), torch.random.fork_rng():
        torch.manual_seed(1)
        stack = build_stack(config.model, [layer_specs(config.model)[LAYER]], LayerContext(dtype=torch.bfloat16))
        for parameter in stack.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
            attach_sink(parameter, GradSink(torch.zeros(parameter.shape)))
        (block,) = stack.ordered()
        assert isinstance(block, Block)
        block.compile_segments(graphs)  # type: ignore[arg-type]  # a backend itself in place of its name
        b, s, h = config.training.micro_batch_size, config.model.seq_length, config.model.hidden_size
        x = torch.randn(s, b, h, dtype=torch.bfloat16, requires_grad=True)
        at = torch.arange(s).expand(b, s)
        batch = Microbatch(at, at, at, torch.ones(b, s), torch.arange(b), share=torch.ones(()))
        for _ in ("compiles", "is counted"):
            graphs.counting = forward = Counting()
            with forward:
                y = block(x, batch)
            graphs.counting = backward = Counting()
            with backward:
                y.backward(torch.ones_like(y))
    return sum(forward.launches.values()), sum(backward.launches.values())


def table(found: dict[str, Launches]) -> str:
    """The lines of the page."""
    lines = ["| a sparse block, launches forward + backward | eager | `--compile` |", "| --- | --- | --- |"]
    for recipe, n in found.items():
        lines.append(f"| {recipe} | {n.forward} + {n.backward} | {n.compiled_forward} + {n.compiled_backward} |")
    return "\n".join(lines) + "\n"


def counts() -> dict[str, Launches]:
    """Of all recipes."""
    return {recipe: count(recipe) for recipe in RECIPES}


def held() -> dict[str, Launches]:
    """The budgets that were written."""
    return {recipe: Launches(*n) for recipe, n in gpu_page.held("sparse_launches").items()}


def text(write: bool) -> str:
    """The table of what is counted now, which is kept where `write`."""
    found = counts()
    if write:
        gpu_page.keep("sparse_launches", found)
    return table(found)


def main(argv: Sequence[str]) -> int:
    """Prints or writes the table; the exit status."""
    return gpu_page.print_or_write("sparse_launches", __doc__, text, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
