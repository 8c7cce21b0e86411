"""What a user of the library does besides a step: evaluate, save, load elsewhere; and what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.comm import ParallelMesh, World
from megalite.errors import CheckpointError, ConfigError, MegaliteError, RuntimeFailure
from megalite.library import Pipeline, ShardedOptimizer, layers_from_module
from megalite.testing import run_ranks, run_single

SAMPLES, MICRO_BATCHES = 3, 4


class Begin(nn.Module):
    """Gives a skip to the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = self.inner(x)
        return y, y[:, :2]


class Middle(nn.Module):
    """Writes into what arrives, passes the skip on, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.steps += 1
        x.mul_(2.0)
        y: Tensor = self.inner(x)
        return y, skip


class End(nn.Module):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([torch.tanh(x), skip], -1)


def layers() -> list[nn.Module]:
    torch.manual_seed(2)
    first, last = nn.Linear(6, 6), nn.Linear(8, 4)
    made = [nn.ReLU(inplace=True), first, Begin(), Middle(), Middle(), Middle(), End(), last]
    made[3].inner.weight.requires_grad_(False)
    return [layer.double() for layer in made]


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def batches(step: int, mesh: ParallelMesh) -> list[tuple[Tensor, Tensor]]:
    """The same whole batch at every number of replicas."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(MICRO_BATCHES, SAMPLES, n, generator=generator).double() for n in (6, 4))
    here = slice(mesh.coordinate("dp"), None, mesh.size("dp"))
    return list(zip(x[here], y[here], strict=True))


Found = tuple[list[float], dict[str, Tensor]]


def trained(world: World, pp: int, zero_stage: int, steps: range, save: str | None, load: str | None) -> Found:
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=pp)
    pipe = Pipeline(layers(), loss=loss, example=torch.empty(SAMPLES, 6).double(), schedule="1f1b", mesh=mesh)
    optimizer = ShardedOptimizer(pipe, lr=0.01, zero_stage=zero_stage)
    if load is not None:
        assert optimizer.load(load) == {"steps": steps.start}
    losses = []
    for step in steps:
        losses.append(pipe.evaluate(batches(step, mesh)).item())
        losses.append(pipe.step(batches(step, mesh)).item())
        optimizer.step()
    if save is not None:
        optimizer.save(save, steps.stop, {"steps": steps.stop})
    return losses, optimizer.weights()


def test_a_checkpoint_goes_on_at_another_layout(tmp_path: Path) -> None:
    """Loss, frozen and trained weights and moments; buffers are each replica's own. evaluate leaves no trace."""
    save = str(tmp_path / "run")
    straight, weights = run_single(trained, 1, 0, range(2), None, None)
    first = run_ranks(trained, 2, 2, 1, range(1), save, None)
    second = run_ranks(trained, 2, 1, 3, range(1, 2), None, save)
    assert straight[0::2] == pytest.approx(straight[1::2], abs=1e-12)
    for (begin, _), (end, own) in zip(first, second, strict=True):
        assert begin + end == pytest.approx(straight, abs=1e-12)
        assert own.keys() == weights.keys()
        for name in own:
            if not name.endswith("steps"):
                torch.testing.assert_close(own[name], weights[name], rtol=0, atol=1e-12)
    assert weights["4.steps"] == 2 * MICRO_BATCHES
    assert second[0][1]["4.steps"] == MICRO_BATCHES + MICRO_BATCHES // 2


def gone_wrong(world: World, case: str) -> list[str]:
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=2)

    def make(**more: Any) -> Pipeline:
        return Pipeline(layers(), loss=loss, example=torch.empty(SAMPLES, 6).double(), mesh=mesh, **more)

    said = []

    def tried(call: Any) -> Any:
        try:
            return call()
        except MegaliteError as error:
            said.append(str(error))

    if case == "count":
        pipe = make()
        tried(lambda: pipe.step(batches(0, mesh)[world.rank :]))
    elif case in ("seeds", "placeholders"):
        own = batches(world.rank if case == "seeds" else 0, mesh)
        if case == "placeholders" and world.rank:  # the first rank alone reads inputs, the last targets
            own = [(torch.zeros(SAMPLES, 6).double(), target) for _, target in own]
        tried(lambda: said.append(f"{make().step(iter(own)):.6f}"))
    elif case == "schedule":
        tried(lambda: make(schedule="interleaved", chunks=3).step(batches(0, mesh)[:3]))
    return said


def test_ranks_that_disagree_are_named_at_once() -> None:
    for said in run_ranks(gone_wrong, 2, "count"):
        assert said == ["micro_batches: 3 on rank 1, 4 on rank 0; all give as many"]


def test_ranks_of_a_replica_read_the_same_samples() -> None:
    """Else the first stage's inputs meet other targets in silence. A constant may stand in where nothing reads it."""
    for said in run_ranks(gone_wrong, 2, "seeds"):
        assert len(said) == 1 and said[0].startswith(
            "micro_batches: ranks 0 and 1, both of replica 0, give different inp"
        )
    first, last = run_ranks(gone_wrong, 2, "placeholders")
    assert first == last and float(first[0]) > 0


def test_messages_are_in_the_words_of_the_library() -> None:
    for said in run_ranks(gone_wrong, 2, "schedule"):
        assert said and "--" not in said[0] and "schedule=interleaved" in said[0]


def one(optimizer: str = "adamw", **settings: Any) -> tuple[Pipeline, ShardedOptimizer]:
    pipe = Pipeline([nn.Linear(2, 2)], loss=lambda y, _: y.mean(), example=torch.empty(1, 2))
    return pipe, ShardedOptimizer(pipe, optimizer, **{"lr": 0.1, **settings})


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"lr": -1.0}, "lr=-1.0: a number from 0 on is wanted"),
        ({"clip_grad": float("nan")}, "clip_grad=nan: a number from 0 on is wanted"),
        ({"adam_beta1": 1.5}, "adam_beta1=1.5: must be >= 0 and < 1; try 0"),
        ({"optimizer": "sgd", "adam_beta1": 0.5}, "adam_beta1: sgd has no such setting; it has sgd_momentum"),
        ({"momentum": 0.9}, "momentum: adamw has no such setting; it has adam_beta1, adam_beta2, adam_eps"),
        ({"adam_beta1": "0.5"}, "adam_beta1='0.5': one like 0.9 is wanted"),
    ],
)
def test_wrong_settings_are_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        one(**settings)
    assert str(raised.value).startswith(line)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (lambda: [nn.Linear(2, 2)], "layers: function; a list of modules is wanted: call what makes it"),
        (nn.Linear(2, 2), "layers: one Linear; cut it by megalite.layers_from_module(module, example)"),
        ([nn.Linear(2, 2), torch.tanh], "layers[1]: builtin_function_or_method; an nn.Module is wanted"),
        ([], "layers: there is none"),
    ],
)
def test_what_is_no_list_of_modules(given: Any, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Pipeline(given, loss=loss, example=torch.empty(1, 2))
    assert str(raised.value) == line


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda y, _: y, "a tensor of shape (1, 2)"),
        (lambda y, _: y.mean().item(), "a float"),
        (lambda y, _: y.mean().detach(), "a tensor that has no gradient (detached)"),
    ],
    ids=["shape", "float", "detached"],
)
def test_what_is_no_loss(wrong: Any, found: str) -> None:
    pipe = Pipeline([nn.Linear(2, 2)], loss=wrong, example=torch.empty(1, 2))
    with pytest.raises(ConfigError) as raised:
        pipe.step([(torch.ones(1, 2), None)])
    line = f"loss: returns {found}; it must return the mean, a 0-dim tensor computed from the output"
    assert str(raised.value) == line


def test_layers_belong_to_one_pipeline_and_a_broken_one_says_so() -> None:
    own = [nn.Linear(2, 2)]
    pipe = Pipeline(own, loss=lambda y, _: y.mean() / 0 if y.sum() else 1 / 0, example=torch.empty(1, 2))
    with pytest.raises(ConfigError, match=r"layers\[0\]: another pipeline has it; make the layers again"):
        Pipeline(own, loss=loss, example=torch.empty(1, 2))
    own[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipe.step([(torch.ones(1, 2), None)])
    with pytest.raises(RuntimeFailure, match="has stopped inside a batch .ZeroDivisionError.; make layers"):
        pipe.step([(torch.ones(1, 2), None)])


def test_a_checkpoint_of_another_optimizer(tmp_path: Path) -> None:
    """Says what `load` takes, in the words of the library; other shapes are not mended by leaving states out."""
    _, optimizer = one("sgd")
    wanted, folder = optimizer.weights(), str(tmp_path)
    optimizer.save(folder, 1)
    with pytest.raises(CheckpointError, match=f"^save={folder}: iter_0000001 exists"):
        optimizer.save(folder, 1)
    _, other = one("adamw")
    with pytest.raises(CheckpointError, match=r"iter_0000001 has no optimizer/.*; state=False takes up the weights"):
        other.load(folder)
    other.load(folder, state=False)
    assert all(torch.equal(value, wanted[name]) for name, value in other.weights().items())
    with pytest.raises(CheckpointError, match="^load: .*nothing: no such directory; give what"):
        other.load(f"{folder}/nothing")
    wide = ShardedOptimizer(Pipeline([nn.Linear(3, 2)], loss=loss, example=torch.empty(1, 3)), lr=0.1)
    with pytest.raises(CheckpointError, match="0.weight: shape") as raised:
        wide.load(folder)
    assert "state=False" not in str(raised.value)


def test_tensors_by_keyword_are_one_line() -> None:
    for call in (
        lambda: layers_from_module(nn.Linear(2, 2), {"x": torch.empty(1, 2)}),  # type: ignore[arg-type]
        lambda: one()[0].step([({"x": torch.empty(1, 2)}, None)]),
    ):
        with pytest.raises(ConfigError, match="an input is dict; .* wrap the module in one whose forward takes them"):
            call()


def test_weights_from_a_state_dict() -> None:
    pipe, optimizer = one(zero_stage=0)
    wanted = {name: torch.full_like(value, 0.25) for name, value in optimizer.weights().items()}
    optimizer.load_weights(wanted)
    assert all(torch.equal(value, wanted[name]) for name, value in optimizer.weights().items())
    with pytest.raises(ConfigError, match=r"weights: 0.bias is missing"):
        optimizer.load_weights({"0.weight": torch.ones(2, 2)})
