"""The way to the experts and back over ranks, against a closed form: expert e multiplies by e + 1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.parallel.expert import combine, dispatch, plan_dispatch
from megalite.testing import run_ranks, run_single

EXPERTS, WIDTH = 6, 5


def case(rank: int, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(tokens [n, h], choices [n, k], weights [n, k], kept) of a rank; ranks have unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(rank)
    n = 4 + 3 * rank if kind != "a rank without tokens" or rank else 0
    k = {"all experts": EXPERTS, "one expert": 1}.get(kind, 2)
    order = torch.rand(n, EXPERTS, generator=generator).argsort(1)
    experts = torch.full((n, 1), 4) if kind == "one expert" else order[:, :k]
    x, weights = (torch.randn(n, m, generator=generator, dtype=torch.float64) for m in (WIDTH, k))
    return x, experts, weights, torch.rand(n, k, generator=generator) < 0.6 if kind == "dropped" else None


def there_and_back(world: World, kind: str) -> tuple[list[Tensor], list[int]]:
    """(result, gradients of tokens and weights; rows of each expert that is here)."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, ep=world.size)
    x, experts, weights, kept = case(world.rank, kind)
    x.requires_grad_()
    weights.requires_grad_()
    plan = plan_dispatch(experts, kept, EXPERTS, mesh["ep"])
    rows = dispatch(x, plan)
    first = mesh["ep"].rank * (EXPERTS // mesh["ep"].size)
    factors = torch.arange(first + 1, first + 1 + len(plan.counts)).repeat_interleave(torch.tensor(plan.counts))
    y = combine(rows * factors[:, None], weights, plan)
    y.square().sum().backward()
    assert x.grad is not None and weights.grad is not None
    return [y.detach(), x.grad, weights.grad], list(plan.counts)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["two experts", "all experts", "one expert", "dropped", "a rank without tokens"])
def test_there_and_back(kind: str, size: int) -> None:
    found = run_ranks(there_and_back, size, kind) if size > 1 else [run_single(there_and_back, kind)]
    counts: list[int] = [rows for _, own in found for rows in own]
    expected = torch.zeros(EXPERTS, dtype=torch.int64)
    for rank, ((y, dx, dweights), _) in enumerate(found):
        x, experts, weights, kept = case(rank, kind)
        factor = (experts + 1).double() * (1.0 if kept is None else kept.double())
        total = (weights * factor).sum(1, keepdim=True)
        torch.testing.assert_close(y, total * x, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(dx, 2 * total.square() * x, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(
            dweights, factor * (2 * total * x.square().sum(1, keepdim=True)), rtol=1e-13, atol=1e-13
        )
        chosen = experts if kept is None else experts[kept]
        expected += torch.bincount(chosen.flatten(), minlength=EXPERTS)
    assert counts == expected.tolist()
