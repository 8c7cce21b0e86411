"""What a layer of somebody's may return: every form equals plain torch in one process at every ZeRO stage, or is
refused in one line before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megalite.comm import ParallelMesh, World
from megalite.errors import ConfigError
from megalite.library import Pipeline, ShardedOptimizer
from megalite.testing import run_ranks

LR, STEPS, MICRO_BATCHES, SAMPLES, WIDTH = 0.05, 2, 2, 3, 4


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Output:
    first: Tensor


class Giver(nn.Module):
    """Returns what `made` makes of itself and its input; every weight is read again in the backward."""

    def __init__(self, made: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.w, self.v = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.made = made

    def forward(self, *x: Tensor) -> Any:
        return self.made(self, *x)


def taken(layer: Giver, *x: Tensor) -> Tensor:
    """A use of all that arrives, the last first."""
    total = layer.a.bias.square()
    for value in x[::-1]:
        flat = value.reshape(value.shape[0] if value.dim() else 1, -1)
        total = total + torch.tanh(flat.sum(1).mean() * layer.w.square() + flat.mean()).sum(0)
    result: Tensor = layer.b(x[0] * total if x[0].shape == (SAMPLES, WIDTH) else total.expand(SAMPLES, WIDTH))
    return result


def first_taken(layer: Giver, *x: Tensor) -> Tensor:
    return taken(layer, x[0])


def last_taken(layer: Giver, *x: Tensor) -> Tensor:
    return taken(layer, x[-1])


def passed(layer: Giver, x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    return layer.b(torch.tanh(x)), *more


def held_back(layer: Giver, x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Its own results go unused; what arrived passes through."""
    return layer.a(x), *more, layer.b(x)


def halved(layer: Giver, x: Tensor) -> tuple[Tensor, Tensor]:
    y = layer.a(x)
    return y, y[:, :2]


def twice(layer: Giver, x: Tensor) -> tuple[Tensor, Tensor]:
    y = layer.a(x)
    return y, y


def in_place(layer: Giver, x: Tensor) -> tuple[Tensor, Tensor]:
    return x.add_(layer.v.square()), x


def in_place_alone(layer: Giver, x: Tensor) -> Tensor:
    return x.mul_(layer.v)


def views_of_one(layer: Giver, x: Tensor) -> tuple[Tensor, ...]:
    return layer.a(x).split(2, 1)


RIGHT: dict[str, list[Callable[..., Any]]] = {
    "two tensors": [lambda m, x: (m.a(x), m.b(x)), taken],
    "four tensors": [lambda m, x: (m.a(x), m.b(x), x @ m.w, x * m.v), taken],
    "one in a tuple": [lambda m, x: (m.a(x),), taken],
    "a named tuple": [lambda m, x: Pair(m.a(x), m.b(x)), taken],
    "the second unused": [lambda m, x: (m.a(x), m.b(x)), first_taken],
    "the first unused": [lambda m, x: (m.a(x), m.b(x)), last_taken],
    "one detached": [lambda m, x: (m.a(x), m.b(x).detach()), taken],
    "a constant": [lambda m, x: (torch.ones_like(x), m.b(x)), taken],
    "the same twice": [twice, taken],
    "a part of the other": [halved, taken],
    "parts of one": [views_of_one, taken],
    "a part of the input": [lambda m, x: (m.a(x), x[:, :2]), taken],
    "the input turned": [lambda m, x: (x.t(), m.b(x)), taken],
    "the input itself": [lambda m, x: (m.a(x), x), taken],
    "the input through two": [lambda m, x: (m.a(x), x), passed, taken],
    "one past a layer": [lambda m, x: (m.a(x), m.b(x)), passed, taken],
    "one past two layers": [lambda m, x: (m.a(x), m.b(x)), passed, passed, last_taken],
    "unused beside passed": [lambda m, x: (m.a(x), m.b(x)), held_back, lambda m, x, y, z: taken(m, y)],
    "written into the input": [in_place, taken],
    "the input after it": [in_place_alone, taken],
    "a weight": [lambda m, x: (m.a(x), m.w), taken],
    "a weight alone": [lambda m, x: m.w, taken],
    "rows of a weight": [lambda m, x: (m.a(x), m.w[:2]), taken],
    "a weight expanded": [lambda m, x: (m.v.expand(SAMPLES, WIDTH), m.a(x)), taken],
    "no dimension": [lambda m, x: (m.a(x), m.b(x).square().mean()), taken],
    "no element": [lambda m, x: (m.a(x), x[:, :0].sum(1, keepdim=True)), taken],
    "weights alone": [lambda m, x: (x * m.w.square().sum(0), x * m.v.square()), taken],
}


def layers(case: str) -> list[nn.Module]:
    torch.manual_seed(4)
    made = [nn.Linear(WIDTH, WIDTH), *(Giver(each) for each in RIGHT[case]), nn.Linear(WIDTH, WIDTH)]
    return [layer.double() for layer in made]


def batch(step: int, replicas: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(replicas, MICRO_BATCHES, SAMPLES, WIDTH, generator=generator).double() for _ in range(2))
    return x, y


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


Found = tuple[list[float], dict[str, Tensor]]


def plainly(case: str, replicas: int) -> Found:
    """One process, torch's SGD."""
    model, losses = nn.ModuleList(layers(case)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(*(whole.flatten(0, 1) for whole in batch(step, replicas)), strict=True):
            out: Any = (x,)
            for layer in model:
                out = layer(*out)
                out = out if isinstance(out, tuple) else (out,)
            total += loss(out[0], y) / (replicas * MICRO_BATCHES)
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def body(world: World, zero_stage: int, pp: int) -> dict[str, Found | str]:
    found: dict[str, Found | str] = {}
    for case in RIGHT:
        mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=pp)
        example = torch.empty(SAMPLES, WIDTH).double()
        pipe = Pipeline(layers(case), loss=loss, example=example, mesh=mesh)
        optimizer = ShardedOptimizer(
            pipe, "sgd", lr=LR, weight_decay=0.0, clip_grad=0.0, zero_stage=zero_stage, sgd_momentum=0.0
        )
        losses = []
        try:
            for step in range(STEPS):
                x, y = (whole[mesh.coordinate("dp")] for whole in batch(step, mesh.size("dp")))
                losses.append(pipe.step(list(zip(x, y, strict=True))).item())
                optimizer.step()
        except RuntimeError as error:
            found[case] = str(error).split("\n")[0]
        else:
            found[case] = losses, optimizer.weights()
    return found


@pytest.mark.parametrize(
    ("zero_stage", "pp"),
    [
        *(pytest.param(stage, 1, marks=pytest.mark.full) for stage in range(3)),
        (3, 1),
        pytest.param(3, 2, marks=pytest.mark.full),
    ],
)
def test_whatever_is_returned_is_right(zero_stage: int, pp: int) -> None:
    wrong = []
    everyone = run_ranks(body, 2 * pp, zero_stage, pp)
    for case in RIGHT:
        expected, tensors = plainly(case, 2)
        names: set[str] = set()
        for rank, found in enumerate(each[case] for each in everyone):
            if isinstance(found, str):
                wrong.append(f"{case}, rank {rank}: {found}")
                continue
            losses, weights = found
            names |= weights.keys()
            away = [
                float(((weights[name] - tensors[name]) / tensors[name].abs().clamp(min=1)).abs().max())
                for name in weights
            ]
            away += [abs(one - other) / max(1.0, abs(other)) for one, other in zip(losses, expected, strict=True)]
            if not max(away) <= 1e-12:
                wrong.append(f"{case}, rank {rank}: {max(away):.3g}")
        assert names == tensors.keys() or wrong
    assert not wrong


REFUSED: dict[str, Callable[..., Any]] = {
    "a list": lambda m, x: [m.a(x), m.b(x)],
    "a dict": lambda m, x: {"x": m.a(x)},
    "a data class": lambda m, x: Output(m.a(x)),
    "a tuple in a tuple": lambda m, x: (m.a(x), (m.b(x), x)),
    "None": lambda m, x: None,
    "None beside a tensor": lambda m, x: (m.a(x), None),
    "a number": lambda m, x: (m.a(x), 1.0),
    "nothing": lambda m, x: (),
    "a generator": lambda m, x: (layer(x) for layer in (m.a, m.b)),
    "indices": lambda m, x: (m.a(x), x.argmax(-1)),
    "two dtypes": lambda m, x: (m.a(x), x.float()),
    "complex numbers": lambda m, x: torch.complex(m.a(x), x),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_travel_is_refused_in_one_line(case: str) -> None:
    given = [nn.Linear(WIDTH, WIDTH).double(), Giver(REFUSED[case]).double()]
    with pytest.raises(ConfigError) as refused:
        Pipeline(given, loss=loss, example=torch.empty(SAMPLES, WIDTH).double())
    (line,) = str(refused.value).splitlines()
    assert line.startswith("layers[1] (Giver): returns ")
