"""Shampoo against its formula and its definition."""

from __future__ import annotations

import math

import pytest
import torch

from megalite.config.optimizer import OptimizerArgs, OptimizerConfig
from megalite.inventory.parameter_placement import ParameterPlacement
from megalite.optim import OPTIMIZERS
from megalite.testing.preconditioned import RULES
from megalite.testing.rates import Rates


@pytest.mark.parametrize("most", [3, 1000])
@pytest.mark.parametrize("shape", [(6, 4), (5, 7), (2, 5, 5)])
def test_shampoo_is_the_papers(shape: tuple[int, ...], most: int) -> None:
    """Against algorithm 1 written again with matrices of whole sides, over roots that change four times."""
    generator, name = torch.Generator().manual_seed(1), "layers.0.fc1.weight"
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    args = OptimizerArgs(shampoo_precondition_frequency=2, shampoo_max_precond_dim=most, shampoo_beta1=0.9)
    config, theirs, mine = OptimizerConfig(lr=0.1, optimizer="shampoo", args=args), start.clone(), start.clone()
    paper = RULES["shampoo"]({name: theirs}, frozenset({name}), config)
    placements = [ParameterPlacement(shape, (0,) * len(shape))]
    rule = OPTIMIZERS["shampoo"]([{"params": [mine], "decay": True, "whole": True, "placements": placements}], config)
    rule.param_groups[0].update(lr=0.1, weight_decay=0.01)
    for step in range(8):
        g = torch.randn(shape, generator=generator, dtype=torch.float64)
        mine.grad = g.clone()
        rule.step()
        paper.step({name: g}, Rates(0.1, 0.1), 0.01)
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-11), step


def test_the_first_step_of_shampoo_is_orthogonal_and_as_long_as_adams() -> None:
    """G = U S V^T: root(G G^T) G root(G^T G) = U V^T, from the definition, whatever S is."""
    args = OptimizerArgs(shampoo_matrix_eps=1e-14)
    p, g = torch.zeros(6, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    group = {"params": [p], "decay": True, "whole": True, "placements": [ParameterPlacement((6, 6), (0, 0))]}
    rule = OPTIMIZERS["shampoo"]([group], OptimizerConfig(lr=1.0, args=args))
    rule.param_groups[0].update(lr=1.0, weight_decay=0.0)
    p.grad = g
    rule.step()
    u, _, v = torch.linalg.svd(g)
    length = float((g / (g.abs() + 1e-8)).norm())
    assert torch.allclose(p, -u @ v * length / 6**0.5, rtol=0, atol=1e-6)


def test_a_skipped_step_leaves_shampoo_as_it_was() -> None:
    args = OptimizerArgs(shampoo_precondition_frequency=1)
    p = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    group = {"params": [p], "decay": True, "whole": True, "placements": [ParameterPlacement((6, 4), (0, 0))]}
    rule = OPTIMIZERS["shampoo"]([group], OptimizerConfig(lr=1.0, args=args))
    rule.param_groups[0]["lr"], p.grad = 0.1, p.clone()
    rule.step()
    kept = [p, *rule.state[p].values(), *(x for side in rule.sides[p] for x in side[1:])]
    before = [x.clone() for x in kept]
    p.grad, rule.found_inf = torch.full_like(p, math.inf), torch.ones(())
    rule.step()
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))
