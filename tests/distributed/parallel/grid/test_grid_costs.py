"""What a grid keeps and sends, counted on ranks, against the table of docs/grids.md and the planner's formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.config import parse
from megalite.inventory import grid_exchanges, model_layers, placement_of
from megalite.microbatch import Microbatch
from megalite.models import layer_specs
from megalite.nn import grid_layers, initialize
from megalite.parallel.grid import Grid, exchange, layers
from megalite.parallel.tensor import LayerContext
from megalite.testing import run_ranks

FLAGS = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 8 --seq-length 16 --micro-batch-size 4 --lr 1e-3 "
    "--train-iters 1 --mock-data --vocab-size 61 --fp64"
).split()
SHAPES = {"2d": (1, 2, 2), "2.5d": (1, 2, 4), "3d": (2, 2, 2), "4d": (2, 1, 2)}


def counted(world: World, shape: tuple[int, int, int], more: list[str]) -> tuple[float, list[int], list[tuple]]:
    """(Numbers that this rank sends for a block, sizes of what autograd keeps of it, (matrix, part) in numbers)."""
    config = parse([*FLAGS, *more], world_size=1, check_files=False)
    sent = 0.0

    def counting(call: Callable[..., Any], times: int) -> Callable[..., Any]:
        def run(x: torch.Tensor, axis: Any, **how: Any) -> Any:
            nonlocal sent
            whole = x.numel() * (axis.size if call.__name__ == "all_gather" else 1)
            sent += times * whole * (axis.size - 1) / axis.size
            return call(x, axis, **how)

        return run

    for module, name, times in (
        (exchange, "all_gather", 1),
        (exchange, "reduce_scatter", 1),
        (layers, "all_gather", 1),
        (layers, "all_reduce_", 2),
    ):
        setattr(module, name, counting(getattr(module, name), times))
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, tp=world.size)
    grid = Grid.of(mesh, shape)
    context = LayerContext(tp=grid.columns, grid=grid_layers(grid), dtype=torch.float64)
    block: Any = layer_specs(config.model)[1].build(context)
    initialize(block, seed=1)
    samples = 4 // shape[2]
    x = torch.randn(16, samples, 64 // grid.columns.size, dtype=torch.float64, requires_grad=True)
    ids = torch.zeros(samples, 16, dtype=torch.int64)
    batch = Microbatch(ids, ids, torch.arange(16).expand(samples, 16), ids.float(), ids[:, 0])
    kept: dict[int, int] = {}
    own = {parameter.data_ptr() for parameter in block.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 8
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = block(x, batch)
    y.sum().backward()
    parts = [(placement_of(p).global_shape, p.numel()) for name, p in block.named_parameters() if len(p.shape) > 1]
    return sent, sorted(kept.values()), parts


GPT, LLAMA = ([], ["--model-type", "llama", "--num-query-groups", "4"])
CASES = [(mode, more) for more in (GPT, LLAMA) for mode in SHAPES]


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        pytest.param(
            *case,
            marks=() if case in (("2d", GPT), ("3d", LLAMA)) else pytest.mark.full,
            id=" ".join([case[0], *case[1][1:2]]),
        )
        for case in CASES
    ],
)
def test_a_block_keeps_and_sends_what_the_table_says(mode: str, more: list[str]) -> None:
    shape = SHAPES[mode]
    ranks = shape[0] * shape[1] * shape[2]
    layer = model_layers(parse([*FLAGS, *more], world_size=1, check_files=False).model)[1]
    expected = sum(each.sent for each in grid_exchanges(layer, shape, 4 * 16))
    widest = max(2 if layer.model.gated else 1, 1) * layer.model.ffn_size
    ((_, alone, _),) = run_ranks(counted, 1, (1, 1, 1), more)
    for sent, kept, parts in run_ranks(counted, ranks, shape, more):
        assert sent == expected, "messages"
        assert all(torch.Size(whole).numel() == ranks * part for whole, part in parts), "parameters: 1/P"
        assert max(kept) == 4 * 16 * widest / ranks, "the largest activation: 1/P"
        assert sum(alone) / ranks <= sum(kept) <= 1.08 * sum(alone) / ranks, "activations: 1/P, and a few of each token"
