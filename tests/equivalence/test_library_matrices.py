"""Muon and its like over modules of one's own: which weights they update as matrices, at any layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalite.comm import ParallelMesh, World
from megalite.errors import ConfigError
from megalite.library import Pipeline, ShardedOptimizer, layers_from_module
from megalite.testing import run_ranks, run_single

RATE, WIDTH, IDS = 0.01, 24, 64


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(IDS, WIDTH)
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, IDS)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.two(torch.tanh(self.one(self.table(ids)))) * self.scale)
        return out


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def trained(world: World, name: str, steps: int, zero: int, traced: bool, **sizes: int) -> dict[str, Tensor]:
    """By how much each weight moves."""
    torch.manual_seed(5)
    module = Module().double()
    example = torch.randint(IDS, (4, 16), generator=torch.Generator().manual_seed(1))
    layers: list[nn.Module] = [module.table, nn.Sequential(module.one, nn.Tanh()), module.two, module.head]
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, **sizes)
    if traced:
        table = {"col": ["one"], "row": ["two"]} if "tp" in sizes else {}
        layers = layers_from_module(module, example, mesh=mesh, tensor_parallel=table)
    pipe = Pipeline(layers, loss=loss, example=example, mesh=mesh)
    optimizer = ShardedOptimizer(pipe, name, lr=RATE, weight_decay=0.0, clip_grad=0.0, zero_stage=zero)
    before = optimizer.all_weights()
    batch = [(example.roll(i, 1), (3 * example.roll(i, 1) + 1) % IDS) for i in range(4)]
    for _ in range(steps):
        pipe.step(batch[mesh.coordinate("dp") :: mesh.size("dp")])
        optimizer.step()
    return {key: value - before[key] for key, value in optimizer.all_weights().items()}


def spread(update: Tensor) -> float:
    values = torch.linalg.svdvals(update)
    return float(values[0] / values[-1])


@pytest.mark.parametrize("traced", [False, True])
def test_muon_takes_the_matrices_between_embedding_and_output(traced: bool) -> None:
    """Its updates have singular values that are nearly equal, what is left to Adam is as with Adam."""
    found = run_single(trained, "muon", 1, 0, traced)
    names = (
        ("one.weight", "two.weight", "table.weight", "head.weight")
        if traced
        else ("1.0.weight", "2.weight", "0.weight", "3.weight")
    )
    one, two, table, head = (found[name] for name in names)
    assert spread(one) < 10 and spread(two) < 10  # five steps of Newton and Schulz, from 1e3 and more
    adam = run_single(trained, "adamw", 1, 0, traced)
    assert torch.equal(adam[names[2]], table) and torch.equal(adam[names[3]], head)
    assert spread(adam[names[0]]) > 30 < spread(adam[names[1]])


@pytest.mark.parametrize("name", ["muon", "soap", "shampoo"])
def test_any_layout_is_one_process(name: str) -> None:
    expected = run_single(trained, name, 4, 0, False)
    adam = run_single(trained, "adamw", 4, 0, False)
    assert (expected["1.0.weight"] - adam["1.0.weight"]).abs().max() > RATE / 10
    for traced, zero, sizes in ((False, 1, {"pp": 2}), (True, 1, {}), (False, 3, {}), (True, 0, {"tp": 2})):
        parts = run_ranks(trained, 2, name, 4, zero, traced, **sizes)
        one = run_single(trained, name, 4, 0, traced)
        for key, value in one.items():
            torch.testing.assert_close(parts[0][key], value, rtol=0, atol=1e-11 if name == "muon" else 1e-8)


def without(world: World) -> str:
    pipe = Pipeline([nn.LayerNorm(4)], loss=lambda y, _: y.mean(), example=torch.empty(1, 4))
    with pytest.raises(ConfigError) as caught:
        ShardedOptimizer(pipe, "muon", lr=RATE)
    return str(caught.value)


def test_where_there_is_no_matrix_it_is_refused() -> None:
    assert (
        "muon: no layer has a matrix for it (of two dimensions, no embedding, in one layer alone); use AdamW"
        in run_single(without)
    )
