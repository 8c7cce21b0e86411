"""What saves memory changes no bit: a pipeline that recomputes equals one that keeps everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence import own_models
from equivalence.layouts import saved_tensors
from megalite.comm import ParallelMesh, World
from megalite.config import parse
from megalite.errors import ConfigError
from megalite.library import Pipeline, ShardedOptimizer
from megalite.testing import run_ranks, run_single
from megalite.train import run_training

FILE = Path(own_models.__file__)
STEPS, MICRO_BATCHES = 2, 4
Found = tuple[list[float], dict[str, Tensor]]


class Stretched(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1.5)


def layers() -> list[nn.Module]:
    """Some draw, some count batches, some write into what they are given."""
    torch.manual_seed(5)
    made: list[nn.Module] = [nn.Linear(3, 6)]
    for _ in range(2):
        made += [Stretched(), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)), nn.BatchNorm1d(6)]
    return [layer.double() for layer in [*made, nn.Linear(6, 2)]]


def trained(world: World, schedule: str, settings: dict[str, Any], moved: dict[str, Any] | None = None) -> Found:
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=world.size)
    example = torch.empty(4, 3, dtype=torch.float64, device="meta")
    pipe = Pipeline(layers(), loss=nn.functional.mse_loss, example=example, schedule=schedule, mesh=mesh, **settings)
    optimizer, losses = ShardedOptimizer(pipe, lr=0.05, **moved or {}), []
    torch.manual_seed(7)
    batches = [
        [(torch.randn(4, 3).double(), torch.randn(4, 2).double()) for _ in range(MICRO_BATCHES)] for _ in range(STEPS)
    ]
    for batch in batches:
        losses.append(pipe.step(batch).item())
        losses.append(optimizer.step().item())
    weights, memory = optimizer.weights(), optimizer.memory()
    optimizer.close()
    first = pipe.layers(min(pipe.stages))[0][1]
    assert len(first._forward_pre_hooks) == bool(settings.get("cpu_offloading_num_layers")), "nothing waits anywhere"
    assert bool(memory["offloaded"]) == bool((moved or {}).get("offload_fraction"))
    return losses, weights


def check(
    ranks: int, schedule: str, settings: dict[str, Any], moved: dict[str, Any] | None = None, plain: str = ""
) -> None:
    expected = run_ranks(trained, ranks, plain or schedule, {})
    found = run_ranks(trained, ranks, schedule, settings, moved)
    for (losses, weights), (others, those) in zip(expected, found, strict=True):
        assert losses == others and weights.keys() == those.keys()
        for name, tensor in weights.items():
            assert torch.equal(tensor, those[name]), name


def test_recomputed_layers_draw_and_count_once() -> None:
    check(1, "1f1b", {"recompute_num_layers": 2})


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "schedule", "settings"),
    [
        (1, "gpipe", {"recompute_num_layers": 1}),
        (2, "zb-h1", {"recompute_num_layers": 2}),
        (2, "1f1b", {"recompute_num_layers": 2, "recompute_method": "block"}),
        (2, "zb-h1", {"recompute_num_layers": 1}),
    ],
)
def test_so_they_do_anywhere(ranks: int, schedule: str, settings: dict[str, Any]) -> None:
    check(ranks, schedule, settings)


@pytest.mark.full
def test_a_schedule_that_recomputes_draws_and_counts_once() -> None:
    check(2, "shifted-critical-path", {}, plain="1f1b")


def test_activations_and_the_optimizer_wait_on_the_host() -> None:
    check(1, "gpipe", {"cpu_offloading_num_layers": 4}, {"offload_fraction": 0.5})


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "settings", "moved", "in_files"),
    [
        ("zb-h1", {"cpu_offloading_num_layers": 2}, {"zero_stage": 1}, False),
        ("2bw", {"cpu_offloading_num_layers": 1}, {"offload_fraction": 1.0}, False),
        ("1f1b", {"recompute_num_layers": 1}, {"offload_fraction": 1.0}, True),
        ("interleaved", {}, {"offload_fraction": 0.3}, True),
    ],
)
def test_so_they_do_in_a_pipeline_and_in_files(
    tmp_path: Path, schedule: str, settings: dict[str, Any], moved: dict[str, Any], in_files: bool
) -> None:
    check(2, schedule, settings, moved | ({"offload_path": str(tmp_path)} if in_files else {}))
    assert not list(tmp_path.iterdir()), "a file of states is gone with its optimizer"


def refused(world: World, settings: dict[str, Any], moved: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        trained(world, "1f1b", settings, moved)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "moved", "text"),
    [
        ({"recompute_num_layers": 0}, {}, "recompute_num_layers=0: a number above 0"),
        ({"recompute_method": "all"}, {}, "recompute_method='all': 'uniform' or 'block'"),
        ({"recompute_num_layers": 1, "cpu_offloading_num_layers": 1}, {}, "cpu_offloading_num_layers=1: 0 or more"),
        ({}, {"offload_fraction": 1.5}, "offload_fraction=1.5: from 0 to 1"),
        ({}, {"offload_path": "/nowhere"}, "offload_fraction=0.0: from 0 to 1, and above 0 with offload_path"),
    ],
)
def test_what_saves_nothing_is_refused(settings: dict[str, Any], moved: dict[str, Any], text: str) -> None:
    assert text in run_single(refused, settings, moved)


BASE = (
    "--seq-length 8 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --eval-iters 0 --device cpu "
    "--num-workers 0 --mock-data --vocab-size 32 --no-exit-signal-handler --lr 1e-2 --fp64 --model-module "
)


def a_run(world: World, argv: list[str]) -> None:
    assert run_training(parse(argv, world_size=world.size), world) == 0


def compare(tmp_path: Path, name: str, ranks: int, layout: str, flags: str) -> None:
    for folder, more in (("plain", ""), ("other", flags)):
        run_ranks(a_run, ranks, f"{BASE} {FILE}:{name} {layout} {more} --save {tmp_path / folder}".split())
    expected, found = saved_tensors(tmp_path / "plain"), saved_tensors(tmp_path / "other")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize(
    ("name", "ranks", "layout", "flags"),
    [
        ("dropping", 1, "", "--recompute-granularity full"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("dropping", 2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
                 "--recompute-granularity full --recompute-method block --recompute-num-layers 2 1"),
                ("dropping", 1, "", "--cpu-offloading-num-layers 2"),
                ("gpt2", 2, "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw",
                 "--recompute-granularity full --recompute-num-layers 2"),
            )
        ),
    ],
)  # fmt: skip
def test_a_module_in_a_run_recomputes_the_same_bits(
    tmp_path: Path, name: str, ranks: int, layout: str, flags: str
) -> None:
    compare(tmp_path, name, ranks, layout, flags)
