"""Modules of one's own in the engine equal the same modules in one process with torch's optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.comm import ParallelMesh, World
from megalite.errors import ConfigError, MegaliteError
from megalite.library import Pipeline, ShardedOptimizer
from megalite.testing import run_ranks, run_single

LR, DECAY, CLIP, STEPS, MICRO_BATCHES, SAMPLES = 0.05, 0.1, 0.5, 3, 4, 3
Losses = list[tuple[float, float]]


class Residual(nn.Module):
    """A block whose last layer has no split backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Bilinear(12, 12, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.up(self.norm(x)))
        return x + 0.1 * self.down(hidden, hidden)


class Tokens(nn.Module):
    """The first layer takes whole numbers; it has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        scaled: Tensor = self.table(tokens).mean(1) * self.scale
        return scaled


def layers() -> list[nn.Module]:
    """Boundaries of three shapes."""
    torch.manual_seed(3)
    wide, narrow = ([Residual(width) for _ in range(3)] for width in (6, 4))
    made = [Tokens(), *wide, nn.Linear(6, 4), *narrow, nn.Linear(4, 5)]
    return [layer.double() for layer in made]


def loss(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y, target)


def batches(step: int, replicas: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Of each replica its micro-batches."""
    generator = torch.Generator().manual_seed(step)
    shape = (replicas, MICRO_BATCHES, SAMPLES)
    tokens = torch.randint(11, (*shape, 7), generator=generator)
    targets = torch.randint(5, shape, generator=generator)
    return [list(zip(tokens[d], targets[d], strict=True)) for d in range(replicas)]


def plainly(replicas: int) -> tuple[Losses, dict[str, Tensor]]:
    """One process, the whole batch at once, torch's AdamW."""
    model = nn.Sequential(*layers())
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer, found = torch.optim.AdamW(groups, lr=LR, eps=1e-8, betas=(0.9, 0.95)), []
    for step in range(STEPS):
        every = [pair for replica in batches(step, replicas) for pair in replica]
        total = loss(model(torch.cat([x for x, _ in every])), torch.cat([y for _, y in every]))
        optimizer.zero_grad()
        total.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        found.append((total.item(), norm.item()))
    return found, model.state_dict()


def numbers(losses: Losses) -> Tensor:
    return torch.tensor(losses, dtype=torch.float64)


def body(world: World, schedule: str, pp: int, zero_stage: int, chunks: int | None) -> tuple[Losses, dict[str, Tensor]]:
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=pp)
    example = torch.empty(SAMPLES, 7, dtype=torch.int64, device="meta")
    here = [layer.to(world.device) for layer in layers()]
    pipe = Pipeline(here, loss=loss, example=example, schedule=schedule, mesh=mesh, chunks=chunks)
    optimizer = ShardedOptimizer(
        pipe, lr=LR, weight_decay=DECAY, clip_grad=CLIP, zero_stage=zero_stage, adam_beta2=0.95
    )
    found: Losses = []
    for step in range(STEPS):
        pairs = batches(step, mesh.size("dp"))[mesh.coordinate("dp")]
        total = pipe.step([(x.to(world.device), y.to(world.device)) for x, y in pairs])
        found.append((total.item(), optimizer.step().item()))
    return found, optimizer.weights()


@pytest.mark.parametrize(
    ("schedule", "pp", "dp", "zero_stage", "chunks"),
    [
        ("zb-h1", 2, 1, 0, None),
        ("chimera", 2, 1, 1, None),
        ("breadth-first", 2, 2, 3, 2),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("1f1b", 1, 1, 0, None),
                ("1f1b", 2, 2, 1, None),
                ("zb-v", 2, 2, 2, None),
                ("gpipe", 4, 1, 1, None),
                ("interleaved", 2, 1, 0, 2),
                ("interleaved", 2, 2, 3, 2),
                ("dualpipe-v", 2, 1, 1, None),
            )
        ),
    ],
)
def test_any_layout_equals_plain_torch(schedule: str, pp: int, dp: int, zero_stage: int, chunks: int | None) -> None:
    losses, weights = plainly(dp)
    seen: set[str] = set()
    for found, own in run_ranks(body, pp * dp, schedule, pp, zero_stage, chunks):
        torch.testing.assert_close(numbers(found), numbers(losses), rtol=0, atol=1e-12)
        seen |= own.keys()
        for name, value in own.items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-12)
    assert seen == weights.keys()


def used_often(places: tuple[int, ...]) -> list[nn.Module]:
    """Layers of which one comes at several places."""
    torch.manual_seed(7)
    shared, others = nn.Linear(6, 6).double(), [nn.Linear(6, 6).double() for _ in range(8)]
    return [shared if index in places else other for index, other in enumerate(others)]


def numbers_of_tied(world: World, schedule: str, places: tuple[int, ...]) -> list[float]:
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=world.size)
    x, own = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6), used_often(places)
    sizes = [4, 4] if world.size == 2 else None
    pipe = Pipeline(
        own, loss=lambda y, t: (y - t).square().mean(), example=x, schedule=schedule, mesh=mesh, sizes=sizes
    )
    optimizer = ShardedOptimizer(pipe, "sgd", lr=0.1, clip_grad=0.0)
    found = []
    for _ in range(3):
        found.append(pipe.step([(x * n, x) for n in range(4)]).item())
        optimizer.step()
    return found


@pytest.mark.parametrize("places", [(1, 4, 7), (0, 6, 7)])
def test_a_module_that_stages_use_unequally_often_is_one_weight(places: tuple[int, ...]) -> None:
    """In Chimera a rank has both stages, one of them with copies."""
    (alone,) = run_ranks(numbers_of_tied, 1, "1f1b", places)
    for found in run_ranks(numbers_of_tied, 2, "chimera", places):
        assert found == pytest.approx(alone, abs=1e-12)


def gradients_alone(world: World) -> dict[str, Tensor]:
    """Without an optimizer of ours, gradients are where torch has them."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=world.size)
    own = layers()
    example = torch.empty(SAMPLES, 7, dtype=torch.int64)
    pipe = Pipeline(own, loss=loss, example=example, schedule="zb-h1", mesh=mesh)
    pipe.step(batches(0, 1)[0])
    here = pipe.cuts[mesh.coordinate("pp")]
    return {f"{i}.{name}": p.grad for i in here for name, p in own[i].named_parameters() if p.grad is not None}


def test_gradients_without_our_optimizer() -> None:
    model = nn.Sequential(*layers())
    pairs = batches(0, 1)[0]
    loss(model(torch.cat([x for x, _ in pairs])), torch.cat([y for _, y in pairs])).backward()
    found = {name: g for own in run_ranks(gradients_alone, 2) for name, g in own.items()}
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=0, atol=1e-12)


def in_pairs(world: World, options: dict[str, Any]) -> str:
    """What is said about options that do not go together, on two pipeline ranks."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=options.pop("pp", 2), tp=options.pop("tp", 1))
    asked = options.pop("micro_batches", batches(0, 1)[0])
    given = {
        "layers": layers(),
        "few": [nn.Linear(6, 6)],
        "two": [nn.LSTM(6, 6), nn.Linear(6, 6)],
    }[options.pop("layers", "layers")]
    example = torch.empty(3, 7, dtype=torch.int64) if len(given) > 3 else torch.empty(3, 6)
    try:
        pipe = Pipeline(given, loss=loss, example=example, mesh=mesh, **options)
        pipe.step(asked)
    except MegaliteError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"schedule": "2bw"}, "schedule='2bw': never drains, so it needs a ShardedOptimizer"),
        ({"schedule": "chimera"}, "schedule='chimera': holds each stage twice: make a ShardedOptimizer, which sums"),
        ({"pp": 1, "tp": 2}, "mesh: tp=2: modules of your own are not cut; make it 1"),
        ({"pp": 1}, "mesh: dp=2: make a ShardedOptimizer, which sums the gradients"),
        ({"layers": "few"}, "1 layers: 2 stages (2 pipeline ranks) hold one each at least"),
        ({"layers": "two"}, "layers[0] (LSTM): returns tuple; a layer takes and returns one floating tensor, or a"),
        ({"sizes": [4, 4]}, "sizes=[4, 4]: 2 numbers above 0 with the sum 9 are wanted"),
        (
            {"schedule": "1f1q"},
            "schedule='1f1q': no such schedule (did you mean '1f1b'?); one of gpipe, 1f1b, eager-1f1b, mes",
        ),
        ({"micro_batches": []}, "micro_batches: there is none"),
        ({"micro_batches": [(torch.zeros(2, 7), None)]}, "micro_batches[0]: its input is (2, 7) of torch.float32, the"),
    ],
)
def test_what_does_not_go_together_is_one_line(options: dict[str, Any], line: str) -> None:
    for said in run_ranks(in_pairs, 2, options):
        assert line in said and "\n" not in said


def twice(world: World) -> str:
    pipe = Pipeline([nn.Linear(2, 2)], loss=lambda y, _: y.mean(), example=torch.empty(1, 2))
    optimizer = ShardedOptimizer(pipe, "muon", lr=0.1)
    said = []
    for call in (optimizer.step, lambda: [pipe.step([(torch.ones(1, 2), None)]) for _ in range(2)]):
        try:
            call()
        except ConfigError as error:
            said.append(str(error))
    return " | ".join(said)


def test_steps_come_in_turn() -> None:
    said = run_single(twice)
    assert said == (
        "ShardedOptimizer.step without a gradient: call Pipeline.step first | "
        "Pipeline.step was called twice: call ShardedOptimizer.step in between"
    )


def frozen(world: World, first: int, last: int) -> tuple[float, list[float]]:
    """Layers `first` to `last` do not learn: the loss, and by how much each layer's parameters have moved."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=world.size)
    own = layers()
    for layer in own[first : last + 1]:
        layer.requires_grad_(False)
    before = [[p.detach().clone() for p in layer.parameters()] for layer in own]
    pipe = Pipeline(own, loss=loss, example=torch.empty(SAMPLES, 7, dtype=torch.int64), schedule="zb-h1", mesh=mesh)
    optimizer = ShardedOptimizer(pipe, lr=LR)
    total = pipe.step(batches(0, 1)[0])
    optimizer.step()
    here = pipe.cuts[mesh.coordinate("pp")]
    moved = [max(float((p - q).abs().max()) for p, q in zip(own[i].parameters(), before[i], strict=True)) for i in here]
    return total.item(), moved


@pytest.mark.parametrize(("first", "last"), [(0, 4), (0, 0), (5, 8)])
def test_layers_that_do_not_learn(first: int, last: int) -> None:
    found = run_ranks(frozen, 2, first, last)
    moved = [x for _, own in found for x in own]
    assert [x == 0.0 for x in moved] == [first <= i <= last for i in range(9)]


class Twice(nn.Module):
    """One linear layer called twice, and a weight tied inside."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.again, self.same = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.same.weight = self.once.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.same(torch.tanh(self.once(x)))
        return x + self.again(torch.tanh(self.again(y)))


def odd_layers() -> list[nn.Module]:
    torch.manual_seed(5)
    return [layer.double() for layer in (nn.Flatten(), nn.Identity(), Twice(), nn.Linear(6, 5))]


def odd(world: World) -> dict[str, Tensor]:
    """A first stage without parameters, layers that are no use to a split backward."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=2)
    x, target = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(1)).double(), torch.tensor([0, 3, 4])
    pipe = Pipeline(odd_layers(), loss=loss, example=x, schedule="zb-h1", mesh=mesh, sizes=[2, 2])
    optimizer = ShardedOptimizer(pipe, lr=LR, weight_decay=DECAY, clip_grad=0.0, adam_beta2=0.95)
    for _ in range(2):
        pipe.step([(x, target), (2 * x, target)])
        optimizer.step()
    return optimizer.weights()


def test_odd_layers_equal_plain_torch() -> None:
    x, target = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(1)).double(), torch.tensor([0, 3, 4])
    model = nn.Sequential(*odd_layers())
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == decays], "weight_decay": DECAY * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=1e-8, betas=(0.9, 0.95))
    for _ in range(2):
        optimizer.zero_grad()
        ((loss(model(x), target) + loss(model(2 * x), target)) / 2).backward()
        optimizer.step()
    found = {name: value for own in run_ranks(odd, 2) for name, value in own.items()}
    assert found.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


class Cast(nn.Module):
    """Its result is bf16, though not on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not x.is_meta):
            y: Tensor = self.inner(x)
            return y


def refused(world: World, case: str) -> None:
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=1 if case == "seeds" else 2)
    torch.manual_seed(0 if case == "cast" else world.rank)
    shared = nn.Linear(6, 6)
    layers = [nn.Sequential(shared), nn.Sequential(shared)] if case == "tied" else [Cast(), Cast()]
    pipe = Pipeline(layers, loss=lambda y, _: y.float().mean(), example=torch.ones(2, 6), mesh=mesh)
    ShardedOptimizer(pipe, lr=LR)
    pipe.step([(torch.ones(2, 6), None)] * 2)


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("seeds", r"layers: 0\.inner\.weight begins with other values on other replicas"),
        ("tied", r"layers: 0\.0\.(weight|bias) begins with other values on other stages that share it; seed alike"),
        ("cast", r"layers\[0\]: returned \(2, 6\) of torch\.bfloat16, but for the example \(2, 6\) of torch\.float32"),
    ],
)
def test_what_would_compute_something_else_is_refused(case: str, line: str) -> None:
    run_ranks(refused, 2, case, expect=line)
