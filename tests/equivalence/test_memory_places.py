"""Masters and moments where a budget puts them, device, host or file: any optimizer, any ZeRO stage, the same bits."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from equivalence.layouts import OPTIMIZERS, TINY, saved_tensors, train, train_body
from megalite.comm.world import World
from megalite.config import Config, parse
from megalite.errors import ConfigError
from megalite.inventory import (
    MemoryPlan,
    given_plan,
    stage_layer_ranges,
)
from megalite.planner import (
    PlannedStages,
    RankMemory,
    program_of,
    rank_memory,
    within_budget,
)
from megalite.testing import run_ranks
from megalite.testing.oracle import Trajectory
from megalite.train.run import open_run
from tests.held_bytes import held_bytes

BASE = [flag for flag in TINY if flag != "--fp64"] + "--bf16 --num-layers 2 --ddp-bucket-size 3000".split()
BASE += ["--micro-batch-size", "2", "--hidden-dropout", "0.1"]
RANKS = 2
RULES = OPTIMIZERS | {"remainders": "--optimizer-state param_remainders"}
SHARES = (0.0, 0.3, 1.0)
"""Of the masters and moments, off the device."""


def memory(config: Config, plan: MemoryPlan | None = None) -> RankMemory:
    program = program_of(config, RANKS)
    cuts = stage_layer_ranges(config, program)
    return rank_memory(PlannedStages(config, RANKS, program, cuts, plan or given_plan(config), on_cpu=True), 0)


def budget_for(argv: list[str], share: float, folder: Path | None = None) -> list[str]:
    """The budget with which so much leaves the device, and, with a folder, that half of it goes into files."""
    moved = ["--offload", "optimizer", "--optimizer-offload-fraction", str(share)] if share else []
    given = memory(parse([*argv, *moved], world_size=RANKS))
    flags = ["--recompute-granularity", "none", "--device-memory-budget-gb", repr((given.total + 1e-3) / 1e9)]
    if folder is None:
        return flags
    room = given.host - memory(parse(argv, world_size=RANKS)).host
    return [*flags, "--host-memory-budget-gb", repr(room / 2e9), "--offload", f"path={folder}"]


@cache
def free(argv: tuple[str, ...]) -> Trajectory:
    return train(list(argv), RANKS, 3)


def assert_same(found: Trajectory, expected: Trajectory) -> None:
    assert found.losses == expected.losses and found.norms == expected.norms
    assert found.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        assert torch.equal(found.tensors[name], value), name


CASES = list(product(RULES, (0, 1, 2, 3), SHARES, (False, True)))
OFTEN = {("adam", 2, 0.3, True)}


@pytest.mark.parametrize(
    ("rule", "stage", "share", "file"),
    [pytest.param(*case, marks=[pytest.mark.full] * (case not in OFTEN)) for case in CASES],
)
def test_a_budget_changes_no_bit(rule: str, stage: int, share: float, file: bool, tmp_path: Path) -> None:
    argv = [*BASE, *RULES[rule].split(), "--zero-stage", str(stage)]
    if share and rule == "remainders":
        with pytest.raises(ConfigError, match="--optimizer-state param_remainders: excludes --offload optimizer"):
            parse([*argv, "--offload", "optimizer"], world_size=RANKS)
        return
    under = [*argv, *budget_for(argv, share, tmp_path if file and share else None)]
    config = parse(under, world_size=RANKS)
    plan = within_budget(config, RANKS, on_cpu=True)
    assert plan.fraction <= share and (plan.fraction > 0) == (share > 0) and plan.room is None
    held = memory(config, plan)
    if file and share == 1.0 and rule in ("adam", "lion", "adam in 16 bits"):
        assert held.file > 0 and held.host > 0
    assert_same(train(under, RANKS, 3), free(tuple(argv)))


def away_body(world: World, argv: list[str]) -> tuple[int, int]:
    """Bytes of masters and moments on the host and in a file, of a run that is about to begin."""
    with open_run(parse(argv, world_size=world.size), world) as run:
        run.directory.begin(0)
        found = {True: 0, False: 0}
        for sub in run.state.model.optimizer.sub_optimizers:
            for master in (master for master in sub.masters if master.offloaded):
                states = [master.tensor, *sub.moments(master).values()]
                in_file = [run.state.model.optimizer.file.region_of(state) is not None for state in states]
                assert len(set(in_file)) == 1
                found[in_file[0]] += sum(state.nbytes for state in states)
        return found[False], found[True]


def test_what_is_planned_is_where_it_lies(tmp_path: Path) -> None:
    argv = [*BASE, "--zero-stage", "2"]
    under = [*argv, *budget_for(argv, 0.7, tmp_path), "--save", str(tmp_path / "run")]
    config = parse(under, world_size=RANKS)
    planned = memory(config, within_budget(config, RANKS, on_cpu=True))
    for host, file in run_ranks(away_body, RANKS, [*under, "--data-cache-path", str(tmp_path / "cache")]):
        assert 0 < host == planned.host and 0 < file == planned.file
    kept = parse(["--config", str(tmp_path / "run" / "config.yaml")], world_size=RANKS)
    assert kept.model == config.model and kept.optimizer == config.optimizer, "what was given, not what was decided"
    assert kept.model.recompute_granularity == "none"


@pytest.mark.full
@pytest.mark.parametrize(("rule", "stage", "file"), list(product(OPTIMIZERS, (0, 1, 2, 3), (False, True))))
def test_so_do_weights_and_gradients(rule: str, stage: int, file: bool, tmp_path: Path) -> None:
    argv = [*BASE, *RULES[rule].split(), "--zero-stage", str(stage)]
    hosted = [*argv, "--offload", "params", *(("--offload", f"path={tmp_path}") if file else ())]
    assert_same(train(hosted, RANKS, 3), free(tuple(argv)))


@pytest.mark.full
def test_a_run_moves_between_places(tmp_path: Path) -> None:
    """An iteration on each: device, host, file, the three of them, weights on the host too, and back."""
    argv = [*BASE, "--zero-stage", "2", "--data-cache-path", str(tmp_path / "cache")]
    (files := tmp_path / "files").mkdir()
    places: list[list[str]] = [
        [],
        ["--offload", "optimizer"],
        ["--offload", f"path={files}"],
        budget_for(argv, 0.7, files),
        ["--offload", "params"],
        budget_for(argv, 0.3),
        [],
    ]
    run_ranks(train_body, RANKS, [*argv, "--save", str(tmp_path / "still")], len(places))
    for place in places:
        run_ranks(train_body, RANKS, [*argv, *place, "--save", str(tmp_path / "moving"), "--auto-resume"], 1)
    found, expected = saved_tensors(tmp_path / "moving"), saved_tensors(tmp_path / "still")
    assert found.keys() == expected.keys() and not any(files.iterdir())
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


PLACES = ("device", "host", "file", "weights")


def still_step(world: World, argv: list[str]) -> bool:
    """Whether a first step, whose learning rate is 0, leaves every weight of a model that was loaded as it is."""
    with open_run(parse(argv, world_size=world.size), world) as run:
        optimizer = run.state.model.optimizer
        before = [shard.local.clone() for shard in optimizer.shards() if "/" not in shard.name]
        assert run.trainer.train_step(drain=True).learning_rate == 0.0
        after = [shard.local for shard in optimizer.shards() if "/" not in shard.name]
        versions = [shard.local for shard in optimizer.version_shards(1, "")]
        rounded = [tensor.to(version.dtype) for tensor, version in zip(after, versions, strict=True)]
        same = zip(before, after, rounded, versions, strict=True)
        return all(torch.equal(a, b) and torch.equal(c, d) for a, b, c, d in same)


@pytest.mark.parametrize("place", [pytest.param("all"), *(pytest.param(p, marks=pytest.mark.full) for p in PLACES)])
def test_weights_alone_and_a_step_of_nothing_leave_every_bit(place: str, tmp_path: Path) -> None:
    argv = [*BASE, "--zero-stage", "1", "--data-cache-path", str(tmp_path / "cache")]
    run_ranks(train_body, RANKS, [*argv, "--save", str(tmp_path / "run")], 1)
    (files := tmp_path / "files").mkdir()
    flags = {
        "device": [],
        "host": ["--offload", "optimizer"],
        "file": ["--offload", f"path={files}"],
        "weights": ["--offload", "params"],
        "all": budget_for(argv, 0.7, files),
    }[place]
    loaded = ["--load", str(tmp_path / "run"), "--no-load-optim", "--finetune", "--lr-warmup", "iters=5"]
    assert all(run_ranks(still_step, RANKS, [*argv, *loaded, *flags]))


def held_body(world: World, argv: list[str]) -> tuple[float, float]:
    """Bytes a parameter on the device and off it, in the buffers and the optimizer of a run after a step."""
    with open_run(parse(argv, world_size=world.size), world) as run:
        run.trainer.train_step(drain=True)
        model = run.state.model
        families = [made for stage in model.buffers.values() for made in stage]
        states = model.optimizer.memory()
        here = sum(sum(held_bytes(made).values()) for made in families)
        here += states["master"] + states["state"]
        count = sum(bucket.plan.stop - bucket.plan.start for made in families for bucket in made.buckets)
        return here / count, states["offloaded"] / count


@pytest.mark.parametrize(
    ("gradients", "device", "less"),
    [pytest.param("", 18, 6, marks=pytest.mark.full), ("--grad-reduce-in-bf16", 16, 4)],
)
def test_device_bytes_a_parameter(gradients: str, device: int, less: int, tmp_path: Path) -> None:
    """AxoNN (arXiv 2110.13005): 20 bytes a parameter, about 4 with its optimizer's memory on the host. Here
    a gradient has one copy, in fp32 or bf16."""
    argv = [*BASE, *gradients.split(), "--data-cache-path", str(tmp_path)]
    found = [run_ranks(held_body, 1, [*argv, *flags])[0] for flags in ([], ["--offload", "optimizer"])]
    for (here, away), expected in zip(found, ((device, 0), (less, 12)), strict=True):
        print(f"{here:.2f} bytes a parameter on the device, {away:.2f} off it {gradients}")
        assert (here, away) == pytest.approx(expected, rel=1e-3)
