"""The split backward of plain modules: the right gradients, those of weights in its second half, nothing twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.comm.p2p import TensorSpec
from megalite.gradient import GradSink, attach_sink
from megalite.microbatch import Microbatch
from megalite.parallel.pipeline.stage import Stage
from megalite.schedule import Costs, build_program, simulate

SIZE, TOKENS, LINEARS = 8, 5, 3


class Plain(nn.Module):
    """Three linear layers, a norm and a residual; the last stage sums its output up. tied: the first layer again."""

    def __init__(self, seed: int, *, is_last: bool, tied: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.is_last, self.tied = is_last, tied
        self.norm = nn.LayerNorm(SIZE, dtype=torch.float64)
        self.linears = nn.ModuleList(nn.Linear(SIZE, SIZE, dtype=torch.float64) for _ in range(LINEARS))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor | None, batch: Microbatch) -> Tensor:
        x = batch.tokens.double() if x is None else x
        y = self.linears[0](self.norm(x))
        for linear in self.linears[1:]:
            y = linear(y.tanh())
        if self.tied:
            y = self.linears[0](y.tanh())
        x = x + y
        return x.square().sum() if self.is_last else x


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def batch_of(microbatch: int) -> Microbatch:
    tokens = torch.randint(0, 9, (TOKENS, SIZE), generator=torch.Generator().manual_seed(microbatch))
    return Microbatch(tokens, tokens, tokens, tokens, torch.arange(TOKENS))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_schedule_that_splits_runs_plain_modules(tied: bool, sinks: bool) -> None:
    program = build_program("zb-h1", 3, 4)
    modules = [Plain(i, is_last=i == 2, tied=tied) for i in range(3)]
    expected = [Plain(i, is_last=i == 2, tied=tied) for i in range(3)]
    for microbatch in range(4):
        x: Tensor | None = None
        for module in expected:
            x = module(x, batch_of(microbatch))
        assert x is not None
        x.backward()

    spec = TensorSpec((TOKENS, SIZE), torch.float64, torch.device("cpu"))
    stages = [Stage([m], None, spec=spec, is_first=i == 0, is_last=i == 2) for i, m in enumerate(modules)]
    if sinks:
        for module in modules:
            for parameter in module.parameters():
                attach_sink(parameter, GradSink(torch.full_like(parameter, 9.0)))
    wires: dict[tuple[str, int, int], Tensor | None] = {}
    products: Counter[tuple[str, int]] = Counter()
    for span in sorted(simulate(program, Costs()).spans, key=lambda span: span.start):
        action = span.action
        i, m = action.stage, action.microbatch
        with Products() as counter:
            if action.kind == "F":
                wires["F", i + 1, m] = stages[i].forward(
                    m, wires.pop(("F", i, m), None), batch_of(m), torch.ones(()), version=0
                )
            elif action.kind == "I":
                wires["I", i - 1, m] = stages[i].backward_input(m, wires.pop(("I", i, m), None))
            elif action.kind == "W":
                stages[i].backward_weight(m)
        products[action.kind, i] += counter.count

    uses = LINEARS + tied
    for i in (1, 2):  # a tied weight's two gradients belong to the first half
        assert products["I", i] == 4 * (uses + 2 * tied)
        assert products["W", i] == 4 * (LINEARS - tied)
    assert products["I", 0] == 0 and products["W", 0] == 4 * 2 * uses
    for actual, exact in zip(modules, expected, strict=True):
        for (name, p), q in zip(actual.named_parameters(), exact.parameters(), strict=True):
            gradient = p.sink.grad if sinks else p.grad  # type: ignore[attr-defined]
            torch.testing.assert_close(gradient, q.grad, rtol=1e-12, atol=1e-12, msg=name)


def test_a_second_half_leaves_nothing_behind() -> None:
    """No gradient of a weight before it, no graph after it."""
    module = Plain(0, is_last=True)
    spec = TensorSpec((TOKENS, SIZE), torch.float64, torch.device("cpu"))
    stage = Stage([module], None, spec=spec, is_first=False, is_last=True)
    stage.forward(0, torch.ones(TOKENS, SIZE, dtype=torch.float64), batch_of(0), torch.ones(()), version=0)
    dx = stage.backward_input(0, None)
    assert dx is not None and dx.shape == (TOKENS, SIZE)
    assert all(parameter.grad is None for parameter in module.parameters())
    stage.backward_weight(0)
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert stage.num_in_flight == 0 and not stage._deferred
