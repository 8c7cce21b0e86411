"""The library's schedules that never drain: bit for bit what `pretrain_gpt.py` makes of the same module."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equivalence import own_models
from equivalence.layouts import saved_tensors
from megalite.comm import ParallelMesh, World
from megalite.config import parse
from megalite.errors import CheckpointError, ConfigError
from megalite.library import Pipeline, ShardedOptimizer, layers_from_module
from megalite.testing import run_ranks, run_single
from megalite.train import run_training
from megalite.train.run_data import open_data, resolve_tokenizer

FILE = Path(own_models.__file__)
STEPS, SAMPLES, LENGTH, RATE, DECAY = 5, 8, 8, 1e-2, 0.1
BASE = (
    f"--seq-length {LENGTH} --micro-batch-size 1 --global-batch-size {SAMPLES} --train-iters {STEPS} --eval-iters 0 "
    f"--device cpu --num-workers 0 --mock-data --vocab-size 32 --fp64 --no-exit-signal-handler --lr {RATE} "
    f"--lr-decay-style constant --weight-decay {DECAY} --pipeline-model-parallel-size 2 --model-module "
)
Batch = list[tuple[Tensor, Tensor]]


def trained(world: World, argv: list[str]) -> None:
    assert run_training(parse(argv, world_size=world.size), world) == 0


def batches_of(argv: list[str], mesh: ParallelMesh) -> list[Batch]:
    config, tokenizer = resolve_tokenizer(parse(argv, world_size=mesh.size("world")))
    data = open_data(config, mesh, tokenizer, World(), earlier_requests=())
    loader = data.train_loader(0)
    return [[(mb.tokens, mb.labels) for mb in loader.next_batch(SAMPLES)] for _ in range(STEPS)]


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """As a run adds up and divides: by powers of two, so that the order of the divisions does not matter."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / LENGTH


def by_library(
    world: World, argv: list[str], folder: str, schedule: str, stop: int, clip: float, settings: dict[str, str]
) -> list[float]:
    """Trains; where `stop` is not the last step, saves there, and goes on in a pipeline that has loaded that."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=2)
    batches = batches_of(argv, mesh)

    def made() -> tuple[Pipeline, ShardedOptimizer]:
        torch.manual_seed(parse(argv, world_size=world.size).training.seed)
        tokens = torch.empty(1, LENGTH, dtype=torch.int64, device="meta")
        layers = layers_from_module(own_models.untied(vocab_size=32).double().train(), tokens)
        pipe = Pipeline(layers, loss=loss, example=tokens, schedule=schedule, mesh=mesh)
        zero = 0 if schedule == "pipedream" else 1
        optimizer = ShardedOptimizer(
            pipe,
            lr=RATE,
            weight_decay=DECAY,
            clip_grad=clip,
            zero_stage=zero,
            **settings,  # type: ignore[arg-type]
        )
        return pipe, optimizer

    pipe, optimizer = made()
    found = []
    for step, (batch, following) in enumerate(zip_longest(batches, batches[1:])):
        drain = step + 1 == stop
        found.append(pipe.step(batch, None if drain else following).item())
        optimizer.step()
        if drain:
            optimizer.save(folder, step + 1)
            pipe, optimizer = made()
            optimizer.load(folder)
    assert abs(pipe.evaluate(batches[-1]).item() - found[-1]) > 0
    optimizer.save(folder, STEPS + 1)
    return found


def compare(tmp_path: Path, schedule: str, optimizer: str, ranks: int, *, flags: str = "", stop: int = STEPS) -> None:
    clip = 0.0 if schedule == "pipedream" else 0.5
    ours, theirs = tmp_path / "run", tmp_path / "library"
    text = f"{BASE} {FILE}:untied --pipeline-schedule {schedule} --optimizer {optimizer} --clip-grad {clip} {flags}"
    text += " --zero-stage 1" if ranks > 2 and clip else ""
    argv = text.split()
    run_ranks(trained, ranks, [*argv, "--save", str(ours), *(["--save-interval", str(stop)] if stop < STEPS else [])])
    settings = {"name": "adamw" if optimizer == "adam" else optimizer}
    if "--staleness-correction" in argv:
        settings["staleness_correction"] = argv[argv.index("--staleness-correction") + 1]
    run_ranks(by_library, ranks, argv, str(theirs), schedule, stop, clip, settings)
    expected, found = saved_tensors(ours), saved_tensors(theirs)
    assert found.keys() == expected.keys() and any(name.startswith("previous/") for name in found)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("optimizer", [pytest.param("adam", marks=pytest.mark.landing), "muon"])
def test_2bw_of_the_library_is_that_of_a_run(tmp_path: Path, optimizer: str) -> None:
    compare(tmp_path, "2bw", optimizer, 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "optimizer", "ranks", "flags", "stop"),
    [
        ("2bw", "adam", 4, "", STEPS),
        ("2bw", "adam", 2, "--staleness-correction error-feedback", STEPS),
        ("2bw", "adam", 2, "", 2),
        ("2bw", "muon", 2, "--staleness-correction none", 3),
        ("pipedream", "adam", 2, "", STEPS),
        ("pipedream", "sgd", 4, "", 2),
    ],
)
def test_so_are_others_and_after_a_resume(
    tmp_path: Path, schedule: str, optimizer: str, ranks: int, flags: str, stop: int
) -> None:
    compare(tmp_path, schedule, optimizer, ranks, flags=flags, stop=stop)


def refused(world: World, case: str) -> str:
    mesh = ParallelMesh.build(rank=0, size=1)
    layers, x = [nn.Linear(3, 3), nn.Linear(3, 3)], torch.zeros(2, 3)
    pipe = Pipeline(layers, loss=nn.functional.mse_loss, example=x, schedule="2bw", mesh=mesh)
    batch = [(torch.ones(2, 3), torch.ones(2, 3)) for _ in range(2)]
    with pytest.raises(ConfigError) as caught:
        if case == "alone":
            pipe.step(batch)
        optimizer = ShardedOptimizer(pipe, lr=0.1)
        pipe.step(batch, batch[:1] if case == "shorter" else list(batch))
        if case == "saved":
            optimizer.step()
            optimizer.save("/nowhere", 1)
        if case == "evaluated":
            optimizer.step()
            pipe.evaluate(batch)
        if case == "other":
            optimizer.step()
            pipe.step([(torch.ones(2, 3), torch.ones(2, 3)) for _ in range(2)])
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("alone", "needs a ShardedOptimizer"),
        ("shorter", "following: 1 micro-batches after 2"),
        ("saved", "the next batch has begun"),
        ("evaluated", "the next batch has begun"),
        ("other", "announced as 'following'"),
    ],
)
def test_what_a_pipeline_that_never_drains_refuses(case: str, text: str) -> None:
    assert text in run_single(refused, case)


def test_what_is_refused_leaves_the_pipeline_as_it_was(tmp_path: Path) -> None:
    assert run_single(refused_then_trained, str(tmp_path)) == 2 * [True]


def refused_then_trained(world: World, folder: str) -> list[bool]:
    """Whether a refused batch can be followed by another, and a refused checkpoint counts no batches."""
    mesh = ParallelMesh.build(rank=0, size=1)
    x, batch = torch.ones(2, 3), [(torch.ones(2, 3), torch.zeros(2, 3)) for _ in range(2)]

    def made(*layers: nn.Module) -> Pipeline:
        return Pipeline(list(layers), loss=nn.functional.mse_loss, example=x, schedule="2bw", mesh=mesh)

    first, second = made(nn.Linear(3, 3)), made(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = ShardedOptimizer(first, lr=0.1)
    with pytest.raises(ConfigError, match="following: 1 micro-batches after 2"):
        first.step(batch, batch[:1])
    trained = bool(first.step(list(batch)) > 0) and bool(optimizer.step() > 0)
    optimizer.save(folder, 1)
    with pytest.raises(CheckpointError):
        ShardedOptimizer(second, lr=0.1).load(folder)
    return [trained, first.batches == 1 and second.batches == 0]
