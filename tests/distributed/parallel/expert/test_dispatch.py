"""The way to the experts and back over ranks, against a closed form: expert e multiplies by e + 1."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megalite.comm.mesh import ParallelMesh
from megalite.comm.shared_memory import share_axis
from megalite.comm.world import World
from megalite.config.model import ModelConfig
from megalite.config.model_parts import Experts
from megalite.microbatch import Microbatch
from megalite.nn.experts import MoE
from megalite.parallel.expert import Dispatched, expert_axes, plan, plan_dispatch
from megalite.parallel.tensor import LayerContext
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


def there_and_back(world: World, kind: str, through_memory: bool = False) -> tuple[list[Tensor], list[int]]:
    """(result, gradients of tokens and weights; rows of each expert that is here)."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, ep=world.size)
    if through_memory:
        mesh.adopt(share_axis(mesh["ep"]))
    x, experts, weights, kept = case(world.rank, kind)
    x.requires_grad_()
    weights.requires_grad_()
    way = plan_dispatch(experts, kept, EXPERTS, mesh["ep"])
    tokens = Dispatched(x, way)
    rows = tokens.wait()
    first = mesh["ep"].rank * (EXPERTS // mesh["ep"].size)
    factors = torch.arange(first + 1, first + 1 + len(way.counts.on_host)).repeat_interleave(way.counts.on_device)
    y = tokens.back(rows * factors[:, None]).combine(weights)
    y.square().sum().backward()
    assert x.grad is not None and weights.grad is not None
    return [y.detach(), x.grad, weights.grad], list(way.counts.on_host)


@pytest.mark.in_turn
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["two experts", "all experts", "one expert", "dropped", "a rank without tokens"])
def test_there_and_back(kind: str, size: int) -> None:
    found = run_ranks(there_and_back, size, kind) if size > 1 else [run_single(there_and_back, kind)]
    if size > 1:
        for own, other in zip(found, run_ranks(there_and_back, size, kind, True), strict=True):
            assert own[1] == other[1] and all(map(torch.equal, own[0], other[0]))
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


class Recorded:
    """A handle that tells when it is waited for."""

    def __init__(self, handle: Any, seen: list[str]) -> None:
        self.handle, self.seen = handle, seen

    def wait(self) -> None:
        self.seen.append("arrived")
        self.handle.wait()


def sparse_layer(world: World, hides: bool) -> tuple[list[str], list[Tensor]]:
    """(What happened, in this order; result and gradients). hides: False waits for tokens before anything else."""
    config = ModelConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8, activation="swiglu", add_bias_linear=False,
        experts=Experts(num_experts=4, moe_ffn_hidden_size=8, moe_shared_expert_intermediate_size=12),
    )  # fmt: skip
    axes = expert_axes(ParallelMesh.build(rank=world.rank, size=world.size, ep=world.size))
    layer = MoE(config, 0, LayerContext(dtype=torch.float64, experts=axes))
    generator = torch.Generator().manual_seed(5)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    x = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(world.rank), dtype=torch.float64).requires_grad_()
    seen: list[str] = []
    start, begin, shared = plan.start_all_to_all_rows, Dispatched.__init__, layer.shared_experts
    assert shared is not None

    def started(*args: Any) -> tuple[Tensor, Any]:
        seen.append("sent")
        rows, handle = start(*args)
        return rows, Recorded(handle, seen)

    def waits_at_once(self: Any, *args: Any) -> None:
        begin(self, *args)
        rows = Dispatched.wait(self)
        self.wait = lambda: rows

    for linear in (shared.fc1, shared.fc2):
        linear.register_forward_hook(lambda *_: seen.append("shared"))
        linear.weight.register_hook(lambda _: seen.append("shared"))
    ids = torch.zeros(2, 8, dtype=torch.int64)
    y = x
    how = patch.object(Dispatched, "__init__", begin if hides else waits_at_once)
    with patch.object(plan, "start_all_to_all_rows", started), how:
        for segment in layer.segments(Microbatch(ids, ids, ids, torch.ones(2, 8), ids[:, 0])):
            y = segment.run(y)
        seen.append("backward")
        y.square().sum().backward()
    return seen, [y.detach(), *(t.grad for t in (x, *layer.parameters()) if t.grad is not None)]


def test_the_shared_expert_is_computed_while_tokens_travel() -> None:
    hiding, plain = (run_ranks(sparse_layer, 2, hides) for hides in (True, False))
    for (seen, found), (others, expected) in zip(hiding, plain, strict=True):
        there, back = ["sent", "shared", "shared", "arrived"], ["sent", "arrived"]
        assert seen == [*there, *back, "backward", *back, *there]
        assert others[:4] == ["sent", "arrived", "shared", "shared"]
        assert len(found) == len(expected) == 7
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
